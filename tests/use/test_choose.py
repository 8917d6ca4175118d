"""What a fine-tuned model says of prompts with endings."""

from itertools import count, islice
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForMultipleChoice, AutoTokenizer

from bertsmith.bundle import HeadConfig, load_fine_tuned, save_fine_tuned
from bertsmith.errors import InputError, ModelError
from bertsmith.model.config import ModelConfig
from bertsmith.text.wordpiece import Tokenizer
from bertsmith.use.choose import choose, iter_choices
from bertsmith.use.predict import predict
from bertsmith.use.predict_lines import predict_lines
from tests.use.conftest import TEXT

QUESTIONS = [
    (TEXT[0], TEXT[1:4]),
    ("iron", ["hammer", "the boy"]),
    (TEXT[2] * 3, [TEXT[1], "water", TEXT[0], TEXT[3] * 2]),
]


def made(directory: Path, tokenizer: Tokenizer, head: HeadConfig = HeadConfig("choice")) -> Path:  # noqa: B008
    """Save a random fine-tuned model."""
    torch.manual_seed(4)
    config = ModelConfig(
        vocab_size=tokenizer.vocab_size, layers=2, width=26, heads=2, feed_forward=37,
        max_positions=41, init_range=0.3,
    )  # fmt: skip
    save_fine_tuned(directory, head.build_model(config), tokenizer, head, {"task": "choose"})
    return directory


def test_the_same_as_the_peer(tmp_path: Path, tokenizer: Tokenizer) -> None:
    """Any number of endings, texts that are cut: transformers' tokenizer and model agree."""
    directory = made(tmp_path / "m", tokenizer)
    words = AutoTokenizer.from_pretrained(directory)
    peer = AutoModelForMultipleChoice.from_pretrained(directory).eval()
    for (prompt, endings), answer in zip(QUESTIONS, choose(directory, QUESTIONS), strict=True):
        prompts = [prompt] * len(endings)
        inputs = words(
            prompts, endings, truncation=True, max_length=41, padding=True, return_tensors="pt"
        )
        with torch.no_grad():
            logits = peer(**{name: rows[None] for name, rows in inputs.items()}).logits[0]
        assert answer.probabilities == pytest.approx(logits.softmax(-1).tolist(), abs=1e-5)
        assert answer.best == int(logits.argmax())
        longest = max(map(len, words(prompts, endings)["input_ids"]))
        assert answer.cut_off == (longest > 41)


def test_what_cannot_be_asked(tmp_path: Path, tokenizer: Tokenizer) -> None:
    """Empty texts and single endings are named by number; each function has its own models."""
    directory = made(tmp_path / "m", tokenizer)
    with pytest.raises(InputError, match="prompt 2 is empty"):
        choose(directory, [("iron", ["a", "b"]), (" ", ["a", "b"])])
    with pytest.raises(InputError, match="ending 1 of prompt 1 is empty"):
        choose(directory, [("iron", ["a", ""])])
    for few in (["hammer"], [], "hammer"):
        with pytest.raises(InputError, match="prompt 1 has fewer than two endings"):
            choose(directory, [("iron", few)])
    with pytest.raises(ModelError, match="kind 'choice'; expected 'single' or 'multi'"):
        predict(directory, ["iron"])
    other = made(tmp_path / "s", tokenizer, HeadConfig("single", ("a", "b")))
    with pytest.raises(ModelError, match="kind 'single'; expected 'choice'"):
        choose(other, [("iron", ["a", "b"])])


def test_questions_without_end(tmp_path: Path, tokenizer: Tokenizer) -> None:
    """Answers come before the questions end, and windows change none of them."""
    bundle = load_fine_tuned(made(tmp_path / "m", tokenizer))
    endless = (QUESTIONS[number % 3] for number in count())
    answers = list(islice(iter_choices(bundle, endless), 300))
    wanted = choose(bundle, QUESTIONS)
    assert [one.best for one in answers] == [wanted[number % 3].best for number in range(300)]


def test_lines_are_prompts_with_their_endings(tmp_path: Path, tokenizer: Tokenizer) -> None:
    """Parted by tabs; the answer is the ending's index, probability and text, and the line."""
    bundle = load_fine_tuned(made(tmp_path / "m", tokenizer))
    ((value, line),) = predict_lines(bundle, ["iron\thammer\tthe boy"])
    (answer,) = choose(bundle, [QUESTIONS[1]])
    assert value == {
        "prompt": "iron", "endings": ["hammer", "the boy"], "best": answer.best,
        "probabilities": pytest.approx(answer.probabilities), "cut_off": False,
        "ending": ("hammer", "the boy")[answer.best], "column": None,
    }  # fmt: skip
    best = f"{answer.probabilities[answer.best]:.4f}"
    assert line == f"{answer.best}\t{best}\t{value['ending']}\tiron\thammer\tthe boy"
    with pytest.raises(InputError, match="line 1 has fewer than two endings"):
        list(predict_lines(bundle, ["iron"]))
