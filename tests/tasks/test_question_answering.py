"""Extractive question answering: windows, predicted spans, losses and metrics."""

import math
import tarfile
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray

from bertsmith.bundle import HeadConfig
from bertsmith.errors import TaskError
from bertsmith.tasks import spans, squad
from bertsmith.tasks.inputs import ExampleCounts, ModelInputs
from bertsmith.tasks.question_answering import (
    QuestionExample,
    collect_labels,
    compute_losses,
    compute_metrics,
    encode_examples,
    read_examples,
)
from bertsmith.tasks.settings import SQUAD_FIELDS, TaskSettings
from bertsmith.text.tokenizer_spec import SPECIAL_TOKENS, TokenizerSpec
from bertsmith.text.wordpiece import Tokenizer

HEAD = HeadConfig("span")
CONTEXT = "Red greens and BLUE, red again"
WORDS = ("red", "green", "blue", "##s", "who", ",", "and", "again")


@pytest.fixture
def tokenizer() -> Tokenizer:
    """A lowercasing tokenizer for some words and a suffix."""
    return Tokenizer(TokenizerSpec(vocab=(*SPECIAL_TOKENS, *WORDS)))


def make_task(**changes: Any) -> TaskSettings:
    """Return settings for span prediction."""
    values = {"kind": "span", **SQUAD_FIELDS, "max_seqlen": 64, **changes}
    return TaskSettings.parse(values, "the test")


def encode_questions(
    examples: list[QuestionExample],
    tokenizer: Tokenizer,
    counts: ExampleCounts | None = None,
    **settings: Any,
) -> ModelInputs:
    """Encode examples with the default settings, except for ``settings``."""
    task = make_task(**settings)
    return encode_examples(examples, tokenizer, HEAD, task, counts or ExampleCounts())


def test_training_data_needs_an_answer() -> None:
    """One answered question is enough."""
    unanswerable = QuestionExample("q", "c", (), "1", "f")
    answerable = QuestionExample("q", "c", (("c", 0),), "2", "f")
    assert collect_labels([unanswerable, answerable], "f") == ()
    with pytest.raises(TaskError, match="f: no question has an answer"):
        collect_labels([unanswerable, unanswerable], "f")


def test_inputs_follow_the_paper(tokenizer: Tokenizer) -> None:
    """Inputs are [CLS] question [SEP] context [SEP]; targets are the answer's tokens or [CLS]."""
    examples = [
        QuestionExample("Who?", CONTEXT, (("greens and", 4),), "1", "f, one"),
        QuestionExample("Who?", CONTEXT, (), "2", "f, two"),
        QuestionExample("who " * 9, CONTEXT, (("reen", 5),), "3", "f, three"),
        QuestionExample("Who?", CONTEXT, (("s", 9),), "4", "f, four"),
    ]
    counts = ExampleCounts()
    inputs = encode_questions(examples, tokenizer, counts, max_question_length=5)
    ids, segments = inputs.sequences[0][0]
    context_tokens = ["red", "green", "##s", "and", "blue", ",", "red", "again"]
    tokens = tokenizer.ids_to_tokens(ids)
    assert tokens == ["[CLS]", "who", "[UNK]", "[SEP]", *context_tokens, "[SEP]"]
    assert segments == [0] * 4 + [1] * 9
    assert inputs.targets is not None
    assert np.concatenate(inputs.targets).tolist() == [[5, 7], [0, 0], [8, 8], [6, 6]]
    assert inputs.targets[0].dtype == np.int64
    window = inputs.decoding_data[0]
    assert window.first_position == 4
    assert [CONTEXT[start:end].lower() for start, end in window.offsets] == [
        "red", "green", "s", "and", "blue", ",", "red", "again"
    ]  # fmt: skip
    truncated_tokens = tokenizer.ids_to_tokens(inputs.sequences[2][0][0])
    assert truncated_tokens[:7] == ["[CLS]", *["who"] * 5, "[SEP]"]
    assert (counts.num_truncated, inputs.is_truncated) == (1, [False, False, True, False])
    unlabeled = [QuestionExample("Who?", CONTEXT, None, "1", "f")]
    assert encode_questions(unlabeled, tokenizer).targets is None


def repeat_words(num_words: int) -> str:
    """Return a context of ``num_words`` words."""
    return " ".join(["red", "Greens", "and", "blue,"][index % 4] for index in range(num_words))


def test_windows_equal_transformers(tmp_path: Path, tokenizer: Tokenizer) -> None:
    """Ids, segments and offsets equal AutoTokenizer's with overflowing tokens and a stride."""
    from transformers import AutoTokenizer

    tokenizer.save(tmp_path)
    hf_tokenizer = AutoTokenizer.from_pretrained(tmp_path)
    max_seqlen = 16
    window_size = max_seqlen - 3 - 4  # without 3 special tokens and 4 question tokens
    for num_words in (1, 5, 6, 7, 13, 40):
        for stride in (1, 2, 4):
            example = QuestionExample("who and who?", repeat_words(num_words), (), "1", "f")
            inputs = encode_questions(
                [example], tokenizer, max_seqlen=max_seqlen, window_stride=stride
            )
            expected = hf_tokenizer(
                example.question,
                example.context,
                truncation="only_second",
                max_length=max_seqlen,
                stride=window_size - stride,
                return_overflowing_tokens=True,
                return_offsets_mapping=True,
            )
            assert [sequences[0] for sequences in inputs.sequences] == list(
                zip(expected["input_ids"], expected["token_type_ids"], strict=True)
            )
            for window, offsets in zip(
                inputs.decoding_data, expected["offset_mapping"], strict=True
            ):
                last_position = window.first_position + len(window.offsets)
                context_offsets = offsets[window.first_position : last_position]
                assert [tuple(pair) for pair in window.offsets.tolist()] == context_offsets


@pytest.mark.parametrize("overlap", [0, 1, 3, 6])
def test_overlapping_windows_equal_transformers(
    tmp_path: Path, tokenizer: Tokenizer, overlap: int
) -> None:
    """``task.window_overlap`` equals the stride of transformers; spans start with any token."""
    from transformers import AutoTokenizer

    tokenizer.save(tmp_path)
    hf_tokenizer = AutoTokenizer.from_pretrained(tmp_path)
    for num_words in (1, 9, 10, 11, 40):
        example = QuestionExample("who and who?", repeat_words(num_words), (), "1", "f")
        inputs = encode_questions([example], tokenizer, max_seqlen=16, window_overlap=overlap)
        expected = hf_tokenizer(
            example.question,
            example.context,
            truncation="only_second",
            max_length=16,
            stride=overlap,
            return_overflowing_tokens=True,
        )
        assert [ids for [(ids, _)] in inputs.sequences] == expected["input_ids"]
        assert all(window.can_start_span.all() for window in inputs.decoding_data)


def test_large_overlap_of_short_windows_is_limited(tokenizer: Tokenizer) -> None:
    """The starts of consecutive windows differ by at least an eighth of the window size."""
    num_tokens, max_seqlen = 200, 36
    example = QuestionExample("who", "red " * num_tokens, (), "1", "f")
    inputs = encode_questions([example], tokenizer, max_seqlen=max_seqlen, window_overlap=128)
    window_size = max_seqlen - 4  # [CLS], 1 question token and two [SEP]
    assert len(inputs) == 1 + math.ceil((num_tokens - window_size) / (window_size // 8))


def test_target_is_cls_unless_window_contains_the_whole_answer(tokenizer: Tokenizer) -> None:
    """A window with only a part of the answer has the same target as a window without answer."""
    context = "red " * 6 + "green blue" + " red" * 6
    example = QuestionExample("who", context, (("green blue", 24),), "1", "f")
    inputs = encode_questions([example], tokenizer, max_seqlen=11, window_stride=2)
    assert inputs.targets is not None
    targets = np.concatenate(inputs.targets).tolist()
    for [(ids, _)], target in zip(inputs.sequences, targets, strict=True):
        tokens = tokenizer.ids_to_tokens(ids)
        is_complete = "green" in tokens and "blue" in tokens
        assert target == ([tokens.index("green"), tokens.index("blue")] if is_complete else [0, 0])
    assert len(set(map(tuple, targets))) > 2


def test_long_question_leaves_room_for_the_context(tokenizer: Tokenizer) -> None:
    """A long question takes at most half of the input; the windows cover the whole context."""
    example = QuestionExample("who " * 70, CONTEXT, (("again", 25),), "1", "f")
    inputs = encode_questions([example], tokenizer, max_seqlen=8)
    covered_tokens = {
        tuple(offsets) for window in inputs.decoding_data for offsets in window.offsets.tolist()
    }
    assert len(covered_tokens) == 8  # The context has 8 tokens.
    assert all(len(ids) <= 8 for [(ids, _)] in inputs.sequences)


def test_token_is_assigned_to_the_window_with_most_context() -> None:
    """Each token is assigned to exactly one window, by the rule of the original run_squad.py."""
    for num_tokens, window_size, stride in (
        (30, 9, 4),
        (31, 10, 3),
        (9, 9, 4),
        (17, 5, 9),
        (12, 7, 6),
    ):
        windows = spans.split_into_windows(num_tokens, window_size, stride)
        assigned = spans.assign_tokens_to_windows(windows)
        for token in range(num_tokens):
            best_context, expected_window = -1.0, -1
            for index, (start, stop) in enumerate(windows):
                if start <= token < stop:
                    context = min(token - start, stop - 1 - token) + 0.01 * (stop - start)
                    if context > best_context:
                        best_context, expected_window = context, index
            assigned_windows = [
                index
                for index, (start, stop) in enumerate(windows)
                if start <= token < stop and assigned[index][token - start]
            ]
            assert assigned_windows == [expected_window]


def score_all_spans(
    outputs: list[NDArray[np.float32]],
    windows: list[spans.ContextWindow],
    context: str,
    max_answer_tokens: int,
) -> dict[str, float]:
    """Return the best score of each text, trying all spans in all windows of a question."""
    scores: dict[str, float] = {}
    for window_outputs, window in zip(outputs, windows, strict=True):
        num_tokens = len(window.offsets)
        for first in range(num_tokens):
            for last in range(first, min(first + max_answer_tokens, num_tokens)):
                if window.can_start_span[first]:
                    text = context[window.offsets[first][0] : window.offsets[last][1]]
                    start_logit = float(window_outputs[window.first_position + first, 0])
                    end_logit = float(window_outputs[window.first_position + last, 1])
                    scores[text] = max(start_logit + end_logit, scores.get(text, -np.inf))
    return scores


def test_best_spans_equal_exhaustive_search(tokenizer: Tokenizer) -> None:
    """N-best spans equal a brute-force search; the null score is the minimum over windows."""
    rng = np.random.default_rng(3)
    contexts = [CONTEXT, "red green blue and again " * 7, "red " * 60]
    examples = [QuestionExample("who", context, None, "", "f") for context in contexts]
    inputs = encode_questions(examples, tokenizer, max_seqlen=16, window_stride=4)
    windows: list[spans.ContextWindow] = inputs.decoding_data
    outputs = [rng.normal(size=(len(ids), 2)).astype(np.float32) for [(ids, _)] in inputs.sequences]
    for max_answer_tokens, num_spans in ((3, 5), (30, 20), (1, 1), (4, 1)):
        predictions = spans.find_best_spans(
            outputs, windows, contexts, max_answer_tokens=max_answer_tokens, num_spans=num_spans
        )
        for example_index, (prediction, context) in enumerate(
            zip(predictions, contexts, strict=True)
        ):
            indices = [
                index
                for index, window in enumerate(windows)
                if window.example_index == example_index
            ]
            question_outputs = [outputs[index] for index in indices]
            question_windows = [windows[index] for index in indices]
            all_scores = score_all_spans(
                question_outputs, question_windows, context, max_answer_tokens
            )
            best = sorted(all_scores.items(), key=lambda item: -item[1])[:num_spans]
            assert [span.text for span in prediction.spans] == [text for text, _ in best]
            scores = [span.score for span in prediction.spans]
            assert scores == pytest.approx([score for _, score in best])
            for span in prediction.spans:
                assert context[span.start : span.end] == span.text
            cls_scores = [window_outputs[0].sum() for window_outputs in question_outputs]
            assert prediction.null_score == pytest.approx(min(cls_scores))


@pytest.mark.parametrize(
    ("strip_accents", "text", "answer"),
    [
        (True, "Ein CAFE\u0301, bitte", "CAFE\u0301"),
        (True, "Das Café, bitte", "Café"),
        (True, "나는 학교에 갔다", "학교에"),
        (False, "나는 학교에 갔다", "학교에"),
        (False, "İstanbul a\u200bb 𝔘 ok", "a\u200bb"),
        (True, "x 𝔘𝔘 y", "𝔘𝔘"),
        (True, "x กรุงนี้ y", "กรุงนี้"),
        (True, "x \u1109\u1165\u110b\u116e\u11af y", "\u1109\u1165\u110b\u116e\u11af"),
    ],
)
def test_predicted_answer_has_the_original_characters(
    strip_accents: bool, text: str, answer: str
) -> None:
    """Lowercasing, accent stripping and decomposition do not change the predicted text."""
    characters = {
        character
        for word in (text, "cafe나는서울")
        for character in word.lower()
        if not character.isspace()
    }
    characters |= set("acfe학교에")
    vocabulary = (*SPECIAL_TOKENS, *sorted(characters), *(f"##{c}" for c in sorted(characters)))
    tokenizer = Tokenizer(TokenizerSpec(vocab=vocabulary, strip_accents=strip_accents))
    start = text.index(answer)
    example = QuestionExample("a", text, ((answer, start),), "1", "f")
    inputs = encode_questions([example], tokenizer)
    assert inputs.targets is not None
    assert inputs.targets[0].tolist() != [[0, 0]]
    outputs = np.zeros((len(inputs.sequences[0][0][0]), 2), np.float32)
    outputs[inputs.targets[0][0], [0, 1]] = 5.0
    (prediction,) = spans.find_best_spans(
        [outputs], inputs.decoding_data, [text], max_answer_tokens=30, num_spans=1
    )
    assert (prediction.spans[0].text, prediction.spans[0].start) == (answer, start)


def test_answer_without_tokens_is_no_target(tokenizer: Tokenizer) -> None:
    """The target is another answer with tokens; without one, the question is not trained."""
    context, removed_answer = "red \ufffd blue", ("\ufffd", 4)
    answers = [(removed_answer,), (removed_answer, ("blue", 6)), ()]
    examples = [
        QuestionExample("who", context, question_answers, str(index), "f")
        for index, question_answers in enumerate(answers)
    ]
    inputs = encode_questions(examples, tokenizer)
    assert inputs.targets is not None
    assert [targets.tolist() for targets in inputs.targets] == [[], [[4, 4]], [[0, 0]]]
    assert inputs.find_inputs_with_target() == [1, 2]
    outputs = [np.zeros((len(ids), 2), np.float32) for [(ids, _)] in inputs.sequences]
    assert 0 <= compute_metrics(outputs, inputs, examples, HEAD, make_task())["f1"] <= 1


def test_context_without_tokens_gives_an_empty_answer(tokenizer: Tokenizer) -> None:
    """A context without tokens has one window; its only span is empty and means no answer."""
    inputs = encode_questions([QuestionExample("who", "\ufffd", None, "", "f")], tokenizer)
    # The input is [CLS] who [SEP] [SEP]. The score of no answer is the sum of the logits of [CLS].
    (prediction,) = spans.find_best_spans(
        [np.ones((4, 2), np.float32)],
        inputs.decoding_data,
        ["\ufffd"],
        max_answer_tokens=3,
        num_spans=2,
    )
    assert [(span.text, span.score) for span in prediction.spans] == [("", 2.0)]


def test_loss_is_mean_cross_entropy_of_start_and_end(tokenizer: Tokenizer) -> None:
    """The softmax is over the tokens of a single window, not over the batch."""
    examples = [
        QuestionExample("who", CONTEXT, (("BLUE, red", 15),), "1", "f"),
        QuestionExample("who", "red", (), "2", "f"),
        QuestionExample("who", "red and", (("red", 0),), "3", "f"),
    ]
    inputs = encode_questions(examples, tokenizer)
    batch = inputs.make_micro_batch([0, 1, 2])
    assert batch.token_indices is not None
    assert torch.equal(batch.token_indices, torch.arange(len(batch.packed.ids)))
    torch.manual_seed(0)
    outputs = torch.randn(len(batch.packed.ids), 2, requires_grad=True)
    losses = compute_losses(outputs, batch, HEAD)
    lengths = [inputs.count_tokens(unit) for unit in range(3)]
    for logits, (start, end), loss in zip(
        torch.split(outputs, lengths), batch.targets, losses, strict=True
    ):
        start_loss = -logits[:, 0].log_softmax(0)[start]
        end_loss = -logits[:, 1].log_softmax(0)[end]
        torch.testing.assert_close(loss, (start_loss + end_loss) / 2)
    (gradient,) = torch.autograd.grad(losses.sum(), outputs)
    assert gradient.isfinite().all()


def test_metrics_use_best_span_and_no_answer_threshold(tokenizer: Tokenizer) -> None:
    """Correct predictions score 1; with a high threshold, a span is always predicted."""
    examples = [
        QuestionExample("who", CONTEXT, (("Red", 0), ("BLUE", 15)), "1", "f"),
        QuestionExample("who", CONTEXT, (), "2", "f"),
    ]
    inputs = encode_questions(examples, tokenizer)
    outputs = [np.zeros((inputs.count_tokens(unit), 2), np.float32) for unit in range(2)]
    outputs[0][7] = 4.0  # The token "blue" has the highest start and end logit.
    outputs[1][0] = 4.0  # [CLS] has the highest logits: no answer is predicted.
    metrics = compute_metrics(outputs, inputs, examples, HEAD, make_task())
    assert (metrics["f1"], metrics["exact"], metrics["NoAns_exact"]) == (1.0, 1.0, 1.0)
    # The margins of no answer are 0 - 2 * 4 for the first question and 2 * 4 - 0 for the second.
    assert -8 < metrics["null_threshold"] < 8
    high_threshold = make_task(null_threshold=9.0)
    assert compute_metrics(outputs, inputs, examples, HEAD, high_threshold)["f1"] == 0.5
    answerable = encode_questions(examples[:1], tokenizer)
    metrics = compute_metrics(outputs[:1], answerable, examples[:1], HEAD, make_task())
    assert metrics == {"f1": 1.0, "exact": 1.0}


@pytest.mark.data
def test_squad_answers_survive_tokenization(tmp_path: Path, shared_text: Path) -> None:
    """The text of the target tokens equals at least 99% of the answers in SQuAD's dev set."""
    with tarfile.open(shared_text.parent / "labelled.tar.xz") as archive:
        names = {"labelled/squad/dev-v1.1.json", "labelled/vocab/bert-base-uncased.txt"}
        for member in archive:
            if member.name in names:
                archive.extract(member, tmp_path, filter="data")
    (tmp_path / "labelled/vocab/bert-base-uncased.txt").rename(tmp_path / "vocab.txt")
    tokenizer = Tokenizer.load(tmp_path / "vocab.txt")
    examples, counts = read_examples(tmp_path / "labelled/squad/dev-v1.1.json", make_task())
    assert counts.num_used == counts.num_read == 10_570
    inputs = encode_questions(examples, tokenizer, max_seqlen=384)
    assert inputs.targets is not None
    outputs = []
    for [(ids, _)], targets in zip(inputs.sequences, inputs.targets, strict=True):
        window_outputs = np.zeros((len(ids), 2), np.float32)
        window_outputs[targets[0], [0, 1]] = 9.0
        outputs.append(window_outputs)
    contexts = [example.context for example in examples]
    predictions = spans.find_best_spans(
        outputs, inputs.decoding_data, contexts, max_answer_tokens=80, num_spans=1
    )
    is_equal = [
        squad.normalize_answer(prediction.spans[0].text)
        == squad.normalize_answer(example.answers[0][0])
        for prediction, example in zip(predictions, examples, strict=True)
        if example.answers
    ]
    assert len(is_equal) == 10_570
    assert np.mean(is_equal) >= 0.99
