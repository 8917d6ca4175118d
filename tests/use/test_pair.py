"""The next-sentence head, beside `transformers` reading the same directory."""

from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import bertsmith
from bertsmith.bundle import PretrainedBundle
from bertsmith.errors import InputError, ModelError
from bertsmith.use.pair import iter_pair_predictions, pair, truncate_pair

PAIRS = [
    ("The forge stood there.", "The smith worked until dark."),
    ("iron", "When the iron was white he lifted it, turned it once, and struck."),
    ("Every hammer on the wall had its own name", "own sound"),
]


def expected(peer: tuple[Any, Any], ids: list[int], second: int) -> float:
    """Return the peer's probability of label 0; segment B begins at the index ``second``."""
    segments = [0] * second + [1] * (len(ids) - second)
    with torch.no_grad():
        output = peer[1](input_ids=torch.tensor([ids]), token_type_ids=torch.tensor([segments]))
    return float(output.seq_relationship_logits.softmax(-1)[0, 0])


def test_probabilities_are_the_peers(loaded: PretrainedBundle, peer: tuple[Any, Any]) -> None:
    """The probability of label 0 is that of `transformers` to 1e-5, alone and in a batch."""
    tokenizer, model = peer
    together = [pairing.follows for pairing in iter_pair_predictions(loaded, PAIRS * 100)]
    assert len(together) == 300
    for index, (a, b) in enumerate(PAIRS):
        with torch.no_grad():
            logits = model(**tokenizer(a, b, return_tensors="pt")).seq_relationship_logits
        wanted = float(logits.softmax(-1)[0, 0])
        assert pair(loaded, a, b) == pytest.approx(wanted, abs=1e-5)
        assert together[index::3] == pytest.approx([wanted] * 100, abs=1e-5)
    assert len({round(share, 4) for share in together[:3]}) == 3


def test_order_matters_and_a_path_will_do(loaded: PretrainedBundle, directory: Path) -> None:
    """A before B is another question than B before A; the public name takes a path."""
    a, b = PAIRS[0]
    assert bertsmith.pair(directory, a, b) == pair(loaded, a, b)
    assert abs(pair(loaded, a, b) - pair(loaded, b, a)) > 1e-4


def test_long_pairs_keep_their_border(loaded: PretrainedBundle, peer: tuple[Any, Any]) -> None:
    """A pair too long for the model loses A's front and B's end, and says how much."""
    tokenizer = loaded.tokenizer
    a = tokenizer.encode("the smith worked " * 30)
    b = tokenizer.encode("every hammer on the wall " * 30)
    room = loaded.config.max_positions - 3
    kept_a, kept_b = a[-room // 2 :], b[: room // 2]
    ids = [tokenizer.cls_id, *kept_a, tokenizer.sep_id, *kept_b, tokenizer.sep_id]
    assert len(ids) == loaded.config.max_positions
    wanted = expected(peer, ids, len(kept_a) + 2)
    (found,) = iter_pair_predictions(
        loaded, [("the smith worked " * 30, "every hammer on the wall " * 30)]
    )
    assert found.follows == pytest.approx(wanted, abs=1e-5)
    assert found.left_out == len(a) + len(b) - room


def one_by_one(a: list[int], b: list[int], room: int) -> tuple[list[int], list[int]]:
    """Cut as the docstring says: a token at a time, from the longer; B first where equal."""
    a, b = list(a), list(b)
    while len(a) + len(b) > room:
        if len(a) > len(b):
            del a[0]
        else:
            del b[-1]
    return a, b


@given(st.integers(1, 40), st.integers(1, 40), st.integers(2, 40))
def test_truncation_takes_from_the_longer(first: int, second: int, room: int) -> None:
    """The arithmetic of the cut equals cutting token by token."""
    a, b = list(range(first)), list(range(100, 100 + second))
    assert truncate_pair(a, b, room) == one_by_one(a, b, room)


def test_special_tokens_in_the_text_are_plain(
    loaded: PretrainedBundle, peer: tuple[Any, Any]
) -> None:
    """A "[SEP]" inside a text is read as the characters it is made of, and moves no border."""
    tokenizer = loaded.tokenizer
    a, b = "the [SEP] smith", "[MASK] worked"
    plain = [tokenizer.encode(text) for text in (a, b)]
    assert tokenizer.sep_id not in plain[0]
    ids = [tokenizer.cls_id, *plain[0], tokenizer.sep_id, *plain[1], tokenizer.sep_id]
    wanted = expected(peer, ids, len(plain[0]) + 2)
    assert pair(loaded, a, b) == pytest.approx(wanted, abs=1e-5)


def test_a_model_without_the_head_is_refused(directory_without_pairs: Path) -> None:
    """A model trained without pairs has no answer, and the message says why."""
    with pytest.raises(ModelError, match="no next-sentence head"):
        pair(directory_without_pairs, *PAIRS[0])


@pytest.mark.parametrize(("a", "b", "name"), [("", "x", "A"), ("x", "  ", "B")])
def test_an_empty_text_is_refused(loaded: PretrainedBundle, a: str, b: str, name: str) -> None:
    """A pair with an empty side is a mistake that names the pair and the side."""
    with pytest.raises(InputError, match=f"pair 2: text {name} is empty"):
        list(iter_pair_predictions(loaded, [PAIRS[0], (a, b)]))
