"""Answers equal those of transformers; thresholds, streaming, errors and SQuAD files."""

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
from bertsmith.use import answer as answer_module
from bertsmith.use import inputs as inputs_module
from bertsmith.use.answer import answer, iter_answers
from bertsmith.use.evaluate import evaluate
from bertsmith.use.predict import predict
from bertsmith.use.predict_lines import predict_lines
from bertsmith.use.submission import predict_squad_answers
from tests.use.conftest import MAX_POSITIONS, SENTENCES

QUESTION = "Who worked there?"
LONG_QUESTION = "questions " * 40
#: Pairs (question, context): a short context, a context of several windows, a question that is
#: truncated, and unusual characters.
QUESTIONS = [
    (QUESTION, SENTENCES[0]),
    ("What did he do?", " ".join(SENTENCES)),
    (LONG_QUESTION, SENTENCES[4]),
    ("Who?", "Ünknown  hämmer—\u200b 나는 iron."),
]
#: Settings of the fine-tuned model, in tokens.
MAX_SEQLEN, WINDOW_STRIDE, MAX_QUESTION_LENGTH, MAX_ANSWER_LENGTH = 48, 9, 20, 6


def save_span_model(directory: Path, tokenizer: Tokenizer, **info: Any) -> Path:
    """Save a random model that predicts spans, with additional fields of bertsmith.json."""
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
    head = HeadConfig("span")
    task = {
        "kind": "span",
        "max_seqlen": MAX_SEQLEN,
        "window_stride": WINDOW_STRIDE,
        "max_question_length": MAX_QUESTION_LENGTH,
        "max_answer_length": MAX_ANSWER_LENGTH,
    }
    info = {"task": "squad", "provenance": {"task": task}, **info}
    save_fine_tuned(directory, head.build_model(config), tokenizer, head, info)
    return directory


def compute_hf_span_scores(
    directory: Path, question: str, context: str
) -> tuple[dict[str, float], float]:
    """Compute the score of each valid span, and the score of no answer, with transformers.

    Windows overlap. A span is only valid in the window in which its first token has the most
    context, as in the original BERT code.
    """
    tokenizer = AutoTokenizer.from_pretrained(directory)
    model = AutoModelForQuestionAnswering.from_pretrained(directory).eval()
    question_ids = tokenizer(question, add_special_tokens=False)["input_ids"]
    question_ids = question_ids[:MAX_QUESTION_LENGTH]
    truncated_question = tokenizer.decode(question_ids)
    question_length = len(tokenizer(truncated_question, add_special_tokens=False)["input_ids"])
    window_size = MAX_SEQLEN - 3 - question_length  # without [CLS] and two [SEP] tokens
    inputs = tokenizer(
        truncated_question,
        context,
        truncation="only_second",
        max_length=MAX_SEQLEN,
        stride=window_size - WINDOW_STRIDE,
        return_overflowing_tokens=True,
        return_offsets_mapping=True,
        return_tensors="pt",
        padding=True,
    )
    offsets = inputs.pop("offset_mapping").tolist()
    inputs.pop("overflow_to_sample_mapping")
    with torch.no_grad():
        output = model(**inputs)
    start_logits, end_logits = output.start_logits.tolist(), output.end_logits.tolist()
    lengths = [int(mask.sum()) - question_length - 3 for mask in inputs["attention_mask"]]
    # For each context token, the window in which it has the most context, and how much.
    best_windows: dict[int, int] = {}
    best_contexts: dict[int, float] = {}
    for window, length in enumerate(lengths):
        for index in range(length):
            token = window * WINDOW_STRIDE + index
            context_score = min(index, length - 1 - index) + 0.01 * length
            if context_score > best_contexts.get(token, -1.0):
                best_windows[token] = window
                best_contexts[token] = context_score
    span_scores: dict[str, float] = {}
    for window, length in enumerate(lengths):
        for start in range(length):
            if best_windows[window * WINDOW_STRIDE + start] != window:
                continue
            for end in range(start, min(start + MAX_ANSWER_LENGTH, length)):
                # The context follows [CLS], the question and [SEP].
                start_index = question_length + 2 + start
                end_index = question_length + 2 + end
                text = context[offsets[window][start_index][0] : offsets[window][end_index][1]]
                score = start_logits[window][start_index] + end_logits[window][end_index]
                span_scores[text] = max(score, span_scores.get(text, -np.inf))
    null_score = min(start[0] + end[0] for start, end in zip(start_logits, end_logits, strict=True))
    return span_scores, null_score


@pytest.mark.parametrize("threshold", [None, -100.0, 0.0, 100.0])
def test_answers_equal_those_of_transformers(
    tmp_path: Path, tokenizer: Tokenizer, threshold: float | None
) -> None:
    """Candidates, scores, probabilities and the chosen answer agree for all thresholds."""
    heldout = {} if threshold is None else {"null_threshold": threshold}
    directory = save_span_model(tmp_path / "m", tokenizer, heldout=heldout)
    answers = answer(directory, QUESTIONS)
    for (question, context), result in zip(QUESTIONS, answers, strict=True):
        span_scores, null_score = compute_hf_span_scores(directory, question, context)
        spans = sorted(span_scores.items(), key=lambda item: -item[1])
        spans = spans[: answer_module.NUM_CANDIDATES]
        best_span_score = spans[0][1]
        expected = spans
        if threshold is not None:
            expected = sorted([*spans, ("", null_score)], key=lambda item: -item[1])
        expected_texts = [text for text, _ in expected]
        assert [candidate.text for candidate in result.candidates] == expected_texts
        scores = np.array([score for _, score in expected])
        assert [candidate.score for candidate in result.candidates] == pytest.approx(
            scores, abs=1e-4
        )
        probabilities = np.exp(scores) / np.exp(scores).sum()
        assert [candidate.probability for candidate in result.candidates] == pytest.approx(
            probabilities, abs=1e-4
        )
        has_no_answer = threshold is not None and null_score - best_span_score > threshold
        assert result.text == ("" if has_no_answer else spans[0][0])
        assert result.probability == pytest.approx(
            dict(zip(expected_texts, probabilities, strict=True))[result.text], abs=1e-4
        )
        if has_no_answer:
            assert (result.start, result.end) == (None, None)
        else:
            assert context[result.start : result.end] == result.text
        assert (result.null_score_diff is None) == (threshold is None)
        assert result.is_truncated == (question == LONG_QUESTION)


def test_answers_are_streamed_in_chunks(tmp_path: Path, tokenizer: Tokenizer) -> None:
    """The first answer is yielded after 3 of 8 questions are read; chunks do not change answers."""
    bundle = load_fine_tuned(save_span_model(tmp_path / "m", tokenizer))
    expected = answer(bundle, QUESTIONS * 2)
    questions_read: list[tuple[str, str]] = []

    def read_questions() -> Iterator[tuple[str, str]]:
        for question in QUESTIONS * 2:
            questions_read.append(question)
            yield question

    stream = iter_answers(bundle, read_questions(), chunk_size=3)
    first = next(stream)
    assert len(questions_read) == 3
    answers = [first, *stream]
    assert [result.text for result in answers] == [result.text for result in expected]
    assert [result.probability for result in answers] == pytest.approx(
        [result.probability for result in expected], abs=1e-5
    )


def test_long_contexts_end_a_chunk(
    tmp_path: Path, tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Questions about long contexts are encoded in small chunks, so that they fit into memory."""
    bundle = load_fine_tuned(save_span_model(tmp_path / "m", tokenizer))
    questions = iter(QUESTIONS)
    monkeypatch.setattr(inputs_module, "MAX_CHUNK_CHARACTERS", sum(map(len, QUESTIONS[0])))
    next(iter_answers(bundle, questions))
    assert len(list(questions)) == len(QUESTIONS) - 1


def test_invalid_questions_and_models_are_errors(tmp_path: Path, tokenizer: Tokenizer) -> None:
    """An empty question or context, and a model of another kind, are errors."""
    directory = save_span_model(tmp_path / "m", tokenizer)
    with pytest.raises(InputError, match="question 2: the context is empty"):
        answer(directory, [("Who?", "iron"), ("Who?", " ")])
    with pytest.raises(InputError, match="question 1: the question is empty"):
        answer(directory, [("\t", "iron")])
    with pytest.raises(ModelError, match="of the kind 'span'; expected 'single'"):
        predict(directory, ["iron"])
    head = HeadConfig("single", ("a", "b"))
    config = ModelConfig(
        vocab_size=tokenizer.vocab_size,
        layers=1,
        width=8,
        heads=1,
        feed_forward=8,
        max_positions=9,
    )
    save_fine_tuned(tmp_path / "c", head.build_model(config), tokenizer, head, {})
    with pytest.raises(ModelError, match="of the kind 'single'; expected 'span'"):
        answer(tmp_path / "c", [("Who?", "iron")])


def test_line_is_a_question_and_its_context(tmp_path: Path, tokenizer: Tokenizer) -> None:
    """The first tab of a line separates the question from the context."""
    bundle = load_fine_tuned(
        save_span_model(tmp_path / "m", tokenizer, heldout={"null_threshold": -100.0})
    )
    ((value, line),) = predict_lines(bundle, ["Who?\tiron and\twater"])
    assert (value["question"], value["context"], value["text"]) == ("Who?", "iron and\twater", "")
    assert (value["start"], value["end"], value["truncated"]) == (None, None, False)
    probabilities = [candidate["probability"] for candidate in value["candidates"]]
    assert sum(probabilities) == pytest.approx(1)
    assert line == f"\t{value['probability']:.4f}\tWho?"
    with pytest.raises(InputError, match="line 2: there is no tab"):
        list(predict_lines(bundle, ["Who?\tiron", "iron"]))


def test_squad_predictions_have_every_question(tmp_path: Path, tokenizer: Tokenizer) -> None:
    """Each question of a SQuAD file gets the result of ``answer``; an empty one is an error."""
    directory = save_span_model(tmp_path / "m", tokenizer)
    questions = [
        {"id": f"q{number}", "question": question, "answers": "?"}
        for number, question in enumerate(("Who?", QUESTION))
    ]
    squad = {"data": [{"paragraphs": [{"context": SENTENCES[0], "qas": questions}]}]}
    (tmp_path / "test.json").write_text(json.dumps(squad))
    bundle = load_fine_tuned(directory)
    first, second = answer(bundle, [("Who?", SENTENCES[0]), (QUESTION, SENTENCES[0])])
    predictions = predict_squad_answers(bundle, tmp_path / "test.json")
    assert predictions == {"q0": first.text, "q1": second.text}
    questions[1]["question"] = ""
    (tmp_path / "test.json").write_text(json.dumps(squad))
    with pytest.raises(TaskError, match="question q1: an empty question"):
        predict_squad_answers(bundle, tmp_path / "test.json")


def test_evaluation_scores_the_predicted_answers(tmp_path: Path, tokenizer: Tokenizer) -> None:
    """A model without a threshold always answers, so unanswerable questions score 0."""
    directory = save_span_model(tmp_path / "m", tokenizer)
    file = tmp_path / "a.jsonl"
    row = {"question": "Who?", "context": SENTENCES[0], "answers": [], "id": "q"}
    file.write_text(json.dumps(row))
    bundle = load_fine_tuned(directory)
    assert predict_squad_answers(bundle, file)["q"]
    metrics = evaluate(bundle, file)
    assert (metrics["f1"], metrics["exact"], metrics["best_f1"]) == (0.0, 0.0, 1.0)
    assert "null_threshold" not in metrics
    assert evaluate(bundle, file, changes={"null_threshold": -1000.0})["f1"] == 1.0
    file.write_text(json.dumps(row | {"answers": [{"text": SENTENCES[0][:4], "answer_start": 0}]}))
    assert set(evaluate(bundle, file)) == {"f1", "exact", "counts"}


def test_tuned_threshold_is_the_default(tmp_path: Path, tokenizer: Tokenizer) -> None:
    """The threshold comes from the held-out metrics; an explicit one overrides it."""
    bundle = load_fine_tuned(
        save_span_model(tmp_path / "m", tokenizer, heldout={"f1": 1.0, "null_threshold": 2.5})
    )
    assert get_task_settings(bundle).null_threshold == 2.5
    assert get_task_settings(bundle, {"null_threshold": 0.0}).null_threshold == 0.0
    without_threshold = load_fine_tuned(save_span_model(tmp_path / "n", tokenizer))
    assert get_task_settings(without_threshold).null_threshold is None
    (no_answer,) = answer(bundle, QUESTIONS[:1], null_threshold=-100.0)
    (best_span,) = answer(bundle, QUESTIONS[:1], null_threshold=float("inf"))
    assert no_answer.text == ""
    assert best_span.text
    assert no_answer.null_score_diff == best_span.null_score_diff
    (at_threshold,) = answer(bundle, QUESTIONS[:1], null_threshold=no_answer.null_score_diff)
    assert at_threshold.text == best_span.text
    with pytest.raises(SettingsError, match="null_threshold is NaN"):
        answer(bundle, QUESTIONS[:1], null_threshold=float("nan"))


def test_models_of_other_toolkits_use_windows_of_transformers(
    tmp_path: Path, tokenizer: Tokenizer
) -> None:
    """Without recorded settings, windows overlap by 128 tokens, or by half of a short input."""
    bundle = load_fine_tuned(save_span_model(tmp_path / "m", tokenizer))
    settings = get_task_settings(bundle)
    assert (settings.window_stride, settings.window_overlap) == (WINDOW_STRIDE, None)
    # The metadata of a model of another toolkit is empty.
    foreign_bundle = replace(bundle, info={})
    settings = get_task_settings(foreign_bundle)
    assert (settings.max_seqlen, settings.window_overlap) == (MAX_POSITIONS, MAX_POSITIONS // 2)
    long_config = bundle.config.model_copy(update={"max_positions": 512})
    for max_seqlen, expected in ((None, (384, 128)), (512, (384, 128)), (40, (40, 20))):
        long_bundle = replace(foreign_bundle, config=long_config, max_seqlen=max_seqlen)
        settings = get_task_settings(long_bundle)
        assert (settings.max_seqlen, settings.window_overlap) == expected
    assert get_task_settings(foreign_bundle, {"window_stride": 7}).window_overlap is None
    assert get_task_settings(bundle, {"window_overlap": 7}).window_overlap == 7
    with pytest.raises(SettingsError, match=r"task\.window_stride and task\.window_overlap both"):
        evaluate(bundle, tmp_path / "a.json", changes={"window_stride": 7, "window_overlap": 7})


def test_answers_with_overlap_equal_those_of_run_qa(tmp_path: Path, tokenizer: Tokenizer) -> None:
    """With ``window_overlap``, the best span of all windows is chosen, as in run_qa.py."""
    directory = save_span_model(tmp_path / "m", tokenizer)
    hf_tokenizer = AutoTokenizer.from_pretrained(directory)
    model = AutoModelForQuestionAnswering.from_pretrained(directory).eval()
    max_seqlen, overlap, max_answer_length = 40, 16, 6
    settings = {
        "kind": "span",
        "max_seqlen": max_seqlen,
        "window_overlap": overlap,
        "max_answer_length": max_answer_length,
    }
    bundle = replace(load_fine_tuned(directory), info={"provenance": {"task": settings}})
    num_different_answers = 0
    for first_character in range(0, 200, 10):
        context = " ".join(SENTENCES)[first_character:]
        encoded = hf_tokenizer(
            QUESTION,
            context,
            truncation="only_second",
            max_length=max_seqlen,
            stride=overlap,
            padding=True,
            return_overflowing_tokens=True,
            return_offsets_mapping=True,
            return_tensors="pt",
        )
        with torch.no_grad():
            output = model(**{name: encoded[name] for name in hf_tokenizer.model_input_names})
        span_scores: dict[str, float] = {}
        for row, offsets in enumerate(encoded["offset_mapping"].tolist()):
            context_tokens = [
                token for token, segment in enumerate(encoded.sequence_ids(row)) if segment == 1
            ]
            for index, start in enumerate(context_tokens):
                for end in context_tokens[index : index + max_answer_length]:
                    text = context[offsets[start][0] : offsets[end][1]]
                    score = float(output.start_logits[row, start] + output.end_logits[row, end])
                    span_scores[text] = max(score, span_scores.get(text, -np.inf))
        expected = max(span_scores, key=lambda text: span_scores[text])
        assert answer(bundle, [(QUESTION, context)])[0].text == expected
        num_different_answers += answer(directory, [(QUESTION, context)])[0].text != expected
    # With ``window_stride`` (maximum context), some answers differ.
    assert num_different_answers > 0
