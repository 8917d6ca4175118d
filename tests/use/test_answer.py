"""What a model answers: the peer's spans and scores, no answer by its threshold, SQuAD's file."""

import json
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import AutoModelForQuestionAnswering, AutoTokenizer

from bertsmith.bundle import HeadConfig, load_fine_tuned, save_fine_tuned
from bertsmith.errors import InputError, ModelError, SettingsError, TaskError
from bertsmith.model.config import ModelConfig
from bertsmith.tasks.families import get_task_settings
from bertsmith.text.wordpiece import Tokenizer
from bertsmith.use import answer as module
from bertsmith.use.answer import answer, iter_answers
from bertsmith.use.evaluate import evaluate
from bertsmith.use.predict import predict
from bertsmith.use.predict_lines import predict_lines
from bertsmith.use.submission import squad_predictions
from tests.use.conftest import TEXT

QUESTION = "Who worked there?"
#: (question, context): short, long enough for several windows, a question that is cut, odd signs.
ASKED = [
    (QUESTION, TEXT[0]),
    ("What did he do?", " ".join(TEXT)),
    ("questions " * 40, TEXT[4]),
    ("Who?", "Ünknown  hämmer—\u200b 나는 iron."),
]


def made(directory: Path, tokenizer: Tokenizer, **info: Any) -> Path:
    """Save a random model that gives spans; ``info`` goes to bertsmith.json."""
    torch.manual_seed(4)
    config = ModelConfig(
        vocab_size=tokenizer.vocab_size, layers=2, width=26, heads=2, feed_forward=37,
        max_positions=61, init_range=0.3,
    )  # fmt: skip
    head = HeadConfig("span")
    task = {
        "kind": "span",
        "length": 48,
        "stride": 9,
        "max_question_length": 20,
        "max_answer_length": 6,
    }
    info = {"task": "squad", "provenance": {"task": task}, **info}
    save_fine_tuned(directory, head.build_model(config), tokenizer, head, info)
    return directory


def of_peer(directory: Path, question: str, context: str) -> tuple[dict[str, float], float]:
    """Return the score of each text that any window allows, and of no answer, by transformers."""
    words = AutoTokenizer.from_pretrained(directory)
    model = AutoModelForQuestionAnswering.from_pretrained(directory).eval()
    asked = words.decode(words(question, add_special_tokens=False)["input_ids"][:20])
    size = len(words(asked, add_special_tokens=False)["input_ids"])
    room = 48 - 3 - size
    inputs = words(
        asked, context, truncation="only_second", max_length=48, stride=room - 9,
        return_overflowing_tokens=True, return_offsets_mapping=True, return_tensors="pt",
        padding=True,
    )  # fmt: skip
    places = inputs.pop("offset_mapping").tolist()
    inputs.pop("overflow_to_sample_mapping")
    with torch.no_grad():
        said = model(**inputs)
    start, end = said.start_logits.tolist(), said.end_logits.tolist()
    sizes = [int(mask.sum()) - size - 3 for mask in inputs["attention_mask"]]
    # Of each token of the context: its most context in any window, and which window that is.
    shown: dict[int, tuple[float, int]] = {}
    for number, length in enumerate(sizes):
        for token in range(length):
            value = min(token, length - 1 - token) + 0.01 * length
            if value > shown.get(number * 9 + token, (-1.0, 0))[0]:
                shown[number * 9 + token] = value, number
    found: dict[str, float] = {}
    for number, length in enumerate(sizes):
        for a in range(length):
            if shown[number * 9 + a][1] != number:
                continue
            for b in range(a, min(a + 6, length)):
                one, two = size + 2 + a, size + 2 + b
                text = context[places[number][one][0] : places[number][two][1]]
                value = start[number][one] + end[number][two]
                found[text] = max(value, found.get(text, -np.inf))
    return found, min(first[0] + last[0] for first, last in zip(start, end, strict=True))


@pytest.mark.parametrize("threshold", [None, -100.0, 0.0, 100.0])
def test_the_same_as_the_peer(
    tmp_path: Path, tokenizer: Tokenizer, threshold: float | None
) -> None:
    """Best spans, their order, scores and probabilities, and no answer beyond the threshold."""
    heldout = {} if threshold is None else {"null_threshold": threshold}
    directory = made(tmp_path / "m", tokenizer, heldout=heldout)
    for (question, context), said in zip(ASKED, answer(directory, ASKED), strict=True):
        spans, null = of_peer(directory, question, context)
        best = sorted(spans.items(), key=lambda item: -item[1])[: module.NUM_CANDIDATES]
        every = best if threshold is None else sorted([*best, ("", null)], key=lambda one: -one[1])
        assert [one.text for one in said.candidates] == [text for text, _ in every]
        scores = np.array([score for _, score in every])
        assert [one.score for one in said.candidates] == pytest.approx(scores, abs=1e-4)
        shares = np.exp(scores) / np.exp(scores).sum()
        assert [one.probability for one in said.candidates] == pytest.approx(shares, abs=1e-4)
        silent = threshold is not None and null - best[0][1] > threshold
        assert said.text == ("" if silent else best[0][0])
        assert said.probability == pytest.approx(
            dict(zip((text for text, _ in every), shares, strict=True))[said.text], abs=1e-4
        )
        if silent:
            assert (said.start, said.end) == (None, None)
        else:
            assert context[said.start : said.end] == said.text
        assert (said.null_score is None) == (threshold is None)
        assert said.cut_off == (question == ASKED[2][0])


def test_a_stream_is_answered_piece_by_piece(
    tmp_path: Path, tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Windows of questions change no answer; the first comes before the last is asked."""
    bundle = load_fine_tuned(made(tmp_path / "m", tokenizer))
    wanted = answer(bundle, ASKED * 2)
    monkeypatch.setattr(module, "_AT_ONCE", 3)
    pulled: list[tuple[str, str]] = []

    def asked() -> Iterator[tuple[str, str]]:
        for one in ASKED * 2:
            pulled.append(one)
            yield one

    stream = iter_answers(bundle, asked())
    first = next(stream)
    assert len(pulled) == 3
    found = [first, *stream]
    assert [one.text for one in found] == [one.text for one in wanted]
    assert [one.probability for one in found] == pytest.approx(
        [one.probability for one in wanted], abs=1e-5
    )


def test_what_cannot_be_answered_is_refused(tmp_path: Path, tokenizer: Tokenizer) -> None:
    """Nothing to ask or to look in, by its number; a model of another kind, either way round."""
    directory = made(tmp_path / "m", tokenizer)
    with pytest.raises(InputError, match="question 2: the context is empty"):
        answer(directory, [("Who?", "iron"), ("Who?", " ")])
    with pytest.raises(InputError, match="question 1: the question is empty"):
        answer(directory, [("\t", "iron")])
    with pytest.raises(ModelError, match="of the kind 'span'; expected 'single'"):
        predict(directory, ["iron"])
    head = HeadConfig("single", ("a", "b"))
    save_fine_tuned(tmp_path / "c", head.build_model(ModelConfig(vocab_size=tokenizer.vocab_size, layers=1,
              width=8, heads=1, feed_forward=8, max_positions=9)), tokenizer, head, {})  # fmt: skip
    with pytest.raises(ModelError, match="of the kind 'single'; expected 'span'"):
        answer(tmp_path / "c", [("Who?", "iron")])


def test_lines_are_told(tmp_path: Path, tokenizer: Tokenizer) -> None:
    """A question, a tab and its context; the value for JSON has all that is known."""
    bundle = load_fine_tuned(made(tmp_path / "m", tokenizer, heldout={"null_threshold": -100.0}))
    ((value, line),) = predict_lines(bundle, ["Who?\tiron and\twater"])
    assert (value["question"], value["context"], value["text"]) == ("Who?", "iron and\twater", "")
    assert (value["start"], value["end"], value["cut_off"]) == (None, None, False)
    assert sum(one["probability"] for one in value["candidates"]) == pytest.approx(1)
    assert line == f"\t{value['probability']:.4f}\tWho?"
    with pytest.raises(InputError, match="line 2: there is no tab"):
        list(predict_lines(bundle, ["Who?\tiron", "iron"]))


def test_a_prediction_file_has_each_question(tmp_path: Path, tokenizer: Tokenizer) -> None:
    """The answer by id, as ``answer`` gives it; wrong answers in the file are not looked at."""
    directory = made(tmp_path / "m", tokenizer)
    questions = [{"id": f"q{number}", "question": question, "answers": "?"}
                 for number, question in enumerate(("Who?", QUESTION))]  # fmt: skip
    raw = {"data": [{"paragraphs": [{"context": TEXT[0], "qas": questions}]}]}
    (tmp_path / "test.json").write_text(json.dumps(raw))
    bundle = load_fine_tuned(directory)
    wanted = [one.text for one in answer(bundle, [("Who?", TEXT[0]), (QUESTION, TEXT[0])])]
    assert squad_predictions(bundle, tmp_path / "test.json") == {"q0": wanted[0], "q1": wanted[1]}
    questions[1]["question"] = ""
    (tmp_path / "test.json").write_text(json.dumps(raw))
    with pytest.raises(TaskError, match="question q1: an empty question"):
        squad_predictions(bundle, tmp_path / "test.json")


def test_scores_are_of_the_answers_that_are_given(tmp_path: Path, tokenizer: Tokenizer) -> None:
    """A model without a threshold always answers: where nothing is right, all it says is wrong."""
    directory, file = made(tmp_path / "m", tokenizer), tmp_path / "a.jsonl"
    row = {"question": "Who?", "context": TEXT[0], "answers": [], "id": "q"}
    file.write_text(json.dumps(row))
    bundle = load_fine_tuned(directory)
    assert squad_predictions(bundle, file)["q"]
    found = evaluate(bundle, file)
    assert (found["f1"], found["exact"], found["best_f1"]) == (0.0, 0.0, 1.0)
    assert "null_threshold" not in found
    assert evaluate(bundle, file, changes={"null_threshold": -1000.0})["f1"] == 1.0
    file.write_text(json.dumps(row | {"answers": [{"text": TEXT[0][:4], "answer_start": 0}]}))
    assert set(evaluate(bundle, file)) == {"f1", "exact", "counts"}


def test_the_tuned_threshold_is_the_models(tmp_path: Path, tokenizer: Tokenizer) -> None:
    """It is read from the held-out figures; what is said now counts more, also in answers."""
    bundle = load_fine_tuned(
        made(tmp_path / "m", tokenizer, heldout={"f1": 1.0, "null_threshold": 2.5})
    )
    assert get_task_settings(bundle).null_threshold == 2.5
    assert get_task_settings(bundle, {"null_threshold": 0.0}).null_threshold == 0.0
    assert (
        get_task_settings(load_fine_tuned(made(tmp_path / "n", tokenizer))).null_threshold is None
    )
    (silent,) = answer(bundle, ASKED[:1], null_threshold=-100.0)
    (spoken,) = answer(bundle, ASKED[:1], null_threshold=float("inf"))
    assert silent.text == ""
    assert spoken.text
    assert silent.null_score == spoken.null_score
    (edge,) = answer(bundle, ASKED[:1], null_threshold=silent.null_score)
    assert edge.text == spoken.text
    with pytest.raises(SettingsError, match="null_threshold is NaN"):
        answer(bundle, ASKED[:1], null_threshold=float("nan"))


def test_a_model_made_elsewhere_has_windows_of_transformers(
    tmp_path: Path, tokenizer: Tokenizer
) -> None:
    """Without recorded settings 128 tokens are shared, at most half an input; else as recorded."""
    bundle = load_fine_tuned(made(tmp_path / "m", tokenizer))
    assert (get_task_settings(bundle).stride, get_task_settings(bundle).overlap) == (9, None)
    foreign = replace(bundle, info={})
    assert (get_task_settings(foreign).length, get_task_settings(foreign).overlap) == (61, 30)
    large = replace(foreign, config=foreign.config.model_copy(update={"max_positions": 512}))
    assert (get_task_settings(large).length, get_task_settings(large).overlap) == (384, 128)
    assert get_task_settings(foreign, {"stride": 7}).overlap is None
    assert get_task_settings(bundle, {"overlap": 7}).overlap == 7
    with pytest.raises(SettingsError, match=r"task\.stride and task\.overlap both"):
        evaluate(bundle, tmp_path / "a.json", changes={"stride": 7, "overlap": 7})


def test_answers_with_overlap_are_those_of_run_qa(tmp_path: Path, tokenizer: Tokenizer) -> None:
    """The best span of all windows that share tokens, by transformers' model and tokenizer."""
    directory = made(tmp_path / "m", tokenizer)
    words = AutoTokenizer.from_pretrained(directory)
    model = AutoModelForQuestionAnswering.from_pretrained(directory).eval()
    bundle = load_fine_tuned(directory)
    settings = {"kind": "span", "length": 40, "overlap": 16, "max_answer_length": 6}
    bundle = replace(bundle, info={"provenance": {"task": settings}})
    differences = 0
    for place in range(0, 200, 10):
        context = " ".join(TEXT)[place:]
        encoded = words(
            QUESTION, context, truncation="only_second", max_length=40, stride=16, padding=True,
            return_overflowing_tokens=True, return_offsets_mapping=True, return_tensors="pt",
        )  # fmt: skip
        with torch.no_grad():
            scores = model(**{name: encoded[name] for name in words.model_input_names})
        spans: dict[str, float] = {}
        for row, offsets in enumerate(encoded["offset_mapping"].tolist()):
            inside = [n for n, one in enumerate(encoded.sequence_ids(row)) if one == 1]
            for first in inside:
                for last in inside[inside.index(first) :][:6]:
                    text = context[offsets[first][0] : offsets[last][1]]
                    value = float(scores.start_logits[row, first] + scores.end_logits[row, last])
                    spans[text] = max(value, spans.get(text, -np.inf))
        expected = max(spans, key=lambda text: spans[text])
        assert answer(bundle, [(QUESTION, context)])[0].text == expected
        differences += answer(directory, [(QUESTION, context)])[0].text != expected
    # By steps and the rule of most context the recorded settings answer differently.
    assert differences
