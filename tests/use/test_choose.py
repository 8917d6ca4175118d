"""Choices equal those of transformers; errors, streaming, and lines of text."""

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
from tests.use.conftest import SENTENCES

#: Maximum number of tokens of the model.
MAX_POSITIONS = 41
#: Pairs (prompt, endings). The last has texts that are truncated.
QUESTIONS = [
    (SENTENCES[0], SENTENCES[1:4]),
    ("iron", ["hammer", "the boy"]),
    (SENTENCES[2] * 3, [SENTENCES[1], "water", SENTENCES[0], SENTENCES[3] * 2]),
]


def save_choice_model(
    directory: Path, tokenizer: Tokenizer, head: HeadConfig | None = None
) -> Path:
    """Save a random fine-tuned model, by default for multiple choice."""
    head = head or HeadConfig("choice")
    torch.manual_seed(4)
    config = ModelConfig(
        vocab_size=tokenizer.vocab_size,
        layers=2,
        width=26,
        heads=2,
        feed_forward=37,
        max_positions=MAX_POSITIONS,
        init_range=0.3,
    )
    save_fine_tuned(directory, head.build_model(config), tokenizer, head, {"task": "choose"})
    return directory


def test_choices_equal_those_of_transformers(tmp_path: Path, tokenizer: Tokenizer) -> None:
    """Probabilities agree to 1e-5 for 2, 3 and 4 endings and for truncated texts."""
    directory = save_choice_model(tmp_path / "m", tokenizer)
    hf_tokenizer = AutoTokenizer.from_pretrained(directory)
    hf_model = AutoModelForMultipleChoice.from_pretrained(directory).eval()
    for (prompt, endings), choice in zip(QUESTIONS, choose(directory, QUESTIONS), strict=True):
        prompts = [prompt] * len(endings)
        inputs = hf_tokenizer(
            prompts,
            endings,
            truncation=True,
            max_length=MAX_POSITIONS,
            padding=True,
            return_tensors="pt",
        )
        with torch.no_grad():
            batch = {name: values[None] for name, values in inputs.items()}
            logits = hf_model(**batch).logits[0]
        assert choice.probabilities == pytest.approx(logits.softmax(-1).tolist(), abs=1e-5)
        assert choice.best_index == int(logits.argmax())
        max_length = max(map(len, hf_tokenizer(prompts, endings)["input_ids"]))
        assert choice.is_truncated == (max_length > MAX_POSITIONS)


def test_invalid_prompts_and_models_are_errors(tmp_path: Path, tokenizer: Tokenizer) -> None:
    """An empty text, fewer than two endings, and a model of another kind are errors."""
    directory = save_choice_model(tmp_path / "m", tokenizer)
    with pytest.raises(InputError, match="prompt 2 is empty"):
        choose(directory, [("iron", ["a", "b"]), (" ", ["a", "b"])])
    with pytest.raises(InputError, match="ending 1 of prompt 1 is empty"):
        choose(directory, [("iron", ["a", ""])])
    for endings in (["hammer"], [], "hammer"):
        with pytest.raises(InputError, match="prompt 1 has fewer than two endings"):
            choose(directory, [("iron", endings)])
    with pytest.raises(ModelError, match="kind 'choice'; expected 'single' or 'multi'"):
        predict(directory, ["iron"])
    classifier = save_choice_model(tmp_path / "s", tokenizer, HeadConfig("single", ("a", "b")))
    with pytest.raises(ModelError, match="kind 'single'; expected 'choice'"):
        choose(classifier, [("iron", ["a", "b"])])


def test_choices_of_endless_input_are_streamed(tmp_path: Path, tokenizer: Tokenizer) -> None:
    """Choices are yielded although the input never ends, and equal those of one call."""
    bundle = load_fine_tuned(save_choice_model(tmp_path / "m", tokenizer))
    questions = (QUESTIONS[number % 3] for number in count())
    choices = list(islice(iter_choices(bundle, questions), 300))
    expected = choose(bundle, QUESTIONS)
    assert [choice.best_index for choice in choices] == [
        expected[number % 3].best_index for number in range(300)
    ]


def test_line_is_a_prompt_and_its_endings(tmp_path: Path, tokenizer: Tokenizer) -> None:
    """A line has tabs between prompt and endings; the output line starts with the best ending."""
    bundle = load_fine_tuned(save_choice_model(tmp_path / "m", tokenizer))
    ((value, line),) = predict_lines(bundle, ["iron\thammer\tthe boy"])
    (choice,) = choose(bundle, [QUESTIONS[1]])
    assert value == {
        "prompt": "iron",
        "endings": ["hammer", "the boy"],
        "best_index": choice.best_index,
        "probabilities": pytest.approx(choice.probabilities),
        "truncated": False,
        "best_ending": ("hammer", "the boy")[choice.best_index],
        "best_column": None,
    }
    probability = f"{choice.probabilities[choice.best_index]:.4f}"
    assert (
        line == f"{choice.best_index}\t{probability}\t{value['best_ending']}\tiron\thammer\tthe boy"
    )
    with pytest.raises(InputError, match="line 1 has fewer than two endings"):
        list(predict_lines(bundle, ["iron"]))
