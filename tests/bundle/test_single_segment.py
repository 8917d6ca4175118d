"""Models with a single segment read single texts, and pairs of texts are input errors."""

from collections.abc import Callable
from pathlib import Path

import pytest

import bertsmith
from bertsmith import bundle
from bertsmith.bundle import HeadConfig
from bertsmith.errors import InputError
from bertsmith.model.bert import BertForPreTraining
from bertsmith.use.explain import attention
from tests.model.examples import make_prime_size_config, make_tokenizer

PAIR = ("word3 word4", "word5")
#: Functions that read a pair with a fine-tuned model, and the kind of the model.
FINE_TUNED_TASKS: dict[str, tuple[HeadConfig, Callable[[Path], object]]] = {
    "predict": (HeadConfig("single", ("a", "b")), lambda m: bertsmith.predict(m, [PAIR])),
    "predict fast": (
        HeadConfig("single", ("a", "b")),
        lambda m: bertsmith.predict(m, [PAIR], fast=True),
    ),
    "rerank": (HeadConfig("regression"), lambda m: bertsmith.rerank(m, PAIR[0], [PAIR[1]])),
    "answer": (HeadConfig("span"), lambda m: bertsmith.answer(m, [PAIR])),
    "choose": (HeadConfig("choice"), lambda m: bertsmith.choose(m, [(PAIR[0], PAIR)])),
}


@pytest.mark.parametrize("name", FINE_TUNED_TASKS)
def test_fine_tuned_model_rejects_pairs(tmp_path: Path, name: str) -> None:
    """Pairs are errors that name the model, in all tasks and in the fast mode."""
    head, read_pair = FINE_TUNED_TASKS[name]
    config = make_prime_size_config(segments=1)
    bundle.save_fine_tuned(tmp_path / "m", head.build_model(config), make_tokenizer(), head, {})
    with pytest.raises(InputError, match=r"/m: the input is a pair of texts, but the model has a"):
        read_pair(tmp_path / "m")
    if head.kind == "single":
        assert len(bertsmith.predict(tmp_path / "m", [PAIR[0]])) == 1


def test_pretrained_model_rejects_pairs(tmp_path: Path) -> None:
    """Next-sentence prediction and attention of a pair are errors; single texts are not."""
    model = BertForPreTraining(make_prime_size_config(segments=1))
    bundle.save(tmp_path / "m", model, make_tokenizer(), {})
    with pytest.raises(InputError, match="the input is a pair of texts"):
        bertsmith.pair(tmp_path / "m", *PAIR)
    with pytest.raises(InputError, match="the input is a pair of texts"):
        attention(tmp_path / "m", *PAIR)
    assert attention(tmp_path / "m", PAIR[0]).segments == [0] * 4
    assert bertsmith.fill(tmp_path / "m", "word3 [MASK]")
