"""Questions about a context: reading them, windows, answers back to their characters, n-best."""

import json
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
from bertsmith.text.tokenizer_spec import TokenizerSpec
from bertsmith.text.wordpiece import SPECIAL_TOKENS, Tokenizer

HEAD = HeadConfig("span")
CONTEXT = "Red greens and BLUE, red again"
WORDS = ("red", "green", "blue", "##s", "who", ",", "and", "again")


@pytest.fixture
def words() -> Tokenizer:
    """Some words and an ending, lowered."""
    return Tokenizer(TokenizerSpec(vocab=(*SPECIAL_TOKENS, *WORDS)))


def task(**changes: Any) -> TaskSettings:
    """Return settings of the kind span."""
    return TaskSettings.parse({"kind": "span", **SQUAD_FIELDS, "length": 64, **changes}, "the test")


def squad_file(path: Path, *questions: Any, context: Any = CONTEXT) -> Path:
    """Write SQuAD's JSON of one paragraph."""
    paragraph = {"context": context, "qas": list(questions)}
    path.write_text(json.dumps({"data": [{"title": "T", "paragraphs": [paragraph]}]}))
    return path


def qa(**changes: Any) -> dict[str, Any]:
    """Return a good question as SQuAD has it; None takes a field out."""
    good = {"id": "q1", "question": "who?", "answers": [{"text": "BLUE", "answer_start": 15}]}
    return {key: value for key, value in (good | changes).items() if value is not None}


def test_both_forms_are_read_alike(tmp_path: Path) -> None:
    """SQuAD's JSON with an unanswerable question, and Hugging Face's lines of the same."""
    plausible = {"is_impossible": True, "plausible_answers": [{"text": "Red", "answer_start": 0}]}
    nested, counts = read_examples(
        squad_file(
            tmp_path / "a.json", qa(is_impossible=False), qa(id="q2", answers=[], **plausible)
        ),
        task(),
    )
    lines = [
        {"id": "q1", "question": "who?", "context": CONTEXT, "title": "T",
         "answers": {"text": ["BLUE"], "answer_start": [15]}},
        {"id": "q2", "question": "who?", "context": CONTEXT,
         "answers": {"text": [], "answer_start": []}},
    ]  # fmt: skip
    (tmp_path / "a.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    flat, _ = read_examples(tmp_path / "a.jsonl", task())
    assert [(one.id, one.question, one.context, one.answers) for one in nested] == [
        ("q1", "who?", CONTEXT, (("BLUE", 15),)), ("q2", "who?", CONTEXT, ())
    ]  # fmt: skip
    assert [one.answers for one in flat] == [one.answers for one in nested]
    assert nested[1].location == f"{tmp_path / 'a.json'}, article 1 (T), paragraph 1, question q2"
    assert flat[1].location == f"{tmp_path / 'a.jsonl'}, line 2"
    assert (counts.num_read, counts.num_used) == (2, 2)
    unknown, _ = read_examples(tmp_path / "a.jsonl", task(), labeled=False)
    assert [one.answers for one in unknown] == [None, None]


def test_flat_questions_without_ids_are_numbered(tmp_path: Path) -> None:
    """SQuAD's own have one each; one's own lines need none."""
    line = {"question": "who?", "context": CONTEXT, "answers": qa()["answers"]}
    (tmp_path / "a.jsonl").write_text((json.dumps(line) + "\n") * 2)
    found, _ = read_examples(tmp_path / "a.jsonl", task())
    assert [one.id for one in found] == ["1", "2"]


def test_flat_fields_may_have_other_names(tmp_path: Path) -> None:
    """Question, context and answers stand where the task says, and only there."""
    line = {"id": 1, "q": "who?", "passage": CONTEXT, "right": qa()["answers"]}
    (tmp_path / "a.jsonl").write_text(json.dumps(line) + "\n")
    [one], _ = read_examples(tmp_path / "a.jsonl", task(text="q", pair="passage", label="right"))
    assert (one.question, one.context, one.answers) == ("who?", CONTEXT, (("BLUE", 15),))
    with pytest.raises(TaskError, match="there is no field 'nope'; the fields are 'id', 'q'"):
        read_examples(tmp_path / "a.jsonl", task(text="q", pair="nope", label="right"))


@pytest.mark.parametrize(
    ("bad", "message"),
    [
        (qa(id="q1"), "an id that stood there before: 'q1'"),
        (qa(id=""), "an id that is no name"),
        (qa(id="q2", question=" \t"), "an empty question"),
        (qa(id="q2", question=7), "a question that is no text: 7"),
        (qa(id="q2", question="who \ud83d?"), "a lone surrogate"),
        (qa(id="q2", question=None), "there is no field 'question'"),
        (qa(id="q2", answers=None), "there is no field 'answers'"),
        (qa(id=None), "there is no field 'id'"),
        (qa(id="q2", answers="BLUE"), "answers of another form"),
        (qa(id="q2", answers={"text": ["BLUE"], "answer_start": []}), "answers of another form"),
        (qa(id="q2", answers=[{"text": "BLUE"}]), "an answer without text and start"),
        (qa(id="q2", answers=[{"text": "BLUE", "answer_start": "15"}]), "without text and start"),
        (qa(id="q2", answers=[{"text": "BLUE", "answer_start": 14}]),
         "a span that is not in its context: 'BLUE' at 14, where ' BLUE, red again' is"),
        (qa(id="q2", answers=[{"text": "again", "answer_start": -5}]), "a span that is not in"),
        (qa(id="q2", answers=[{"text": " ", "answer_start": 3}]), "an empty answer"),
        (qa(id="q2", answers=[{"text": "Red", "answer_start": 0},
                              {"text": "red", "answer_start": 0}]), "'red' at 0, where 'Red"),
        (qa(id="q2", is_impossible=True), "answers that is_impossible denies: it is True"),
        (qa(id="q2", answers=[], is_impossible=False), "answers that is_impossible denies"),
        (["who?"], "no JSON object"),
    ],
)  # fmt: skip
def test_a_bad_question_is_told_or_counted(tmp_path: Path, bad: Any, message: str) -> None:
    """An error names file, article, paragraph and question; with skip_bad it is counted."""
    file = squad_file(tmp_path / "a.json", qa(), bad, qa(id="q3"))
    with pytest.raises(TaskError) as found:
        read_examples(file, task())
    assert message in str(found.value)
    assert f"{file}, article 1 (T), paragraph 1, question" in str(found.value)
    assert "--skip-bad" in str(found.value)
    examples, counts = read_examples(file, task(skip_bad=True))
    assert [example.id for example in examples] == ["q1", "q3"]
    assert (counts.num_read, counts.num_used, sum(counts.skipped.values())) == (3, 2, 1)


def test_an_empty_context_is_each_questions_fault(tmp_path: Path) -> None:
    """Two questions about nothing are two skips; nothing is left, and that is an error."""
    file = squad_file(tmp_path / "a.json", qa(), qa(id="q2"), context="\n")
    with pytest.raises(TaskError, match=r"question q1: an empty context"):
        read_examples(file, task())
    with pytest.raises(TaskError, match="no example could be used, of 2"):
        read_examples(file, task(skip_bad=True))


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("7", "a.json: there is no list 'data'"),
        ('{"data": [{"title": "T"}]}', r"article 1 \(T\): there is no list 'paragraphs'"),
        ('{"data": [{"paragraphs": [3]}]}', "article 1, paragraph 1: there is no list 'qas'"),
        ('{"id": 1}\n{"id": 2}\n', r"not JSON: .*whose name ends in \.jsonl or \.parquet"),
        ("[" * 10**5, r"a\.json, line 1: not JSON: nested too deeply"),
        ("[{}, ]", r"a\.json, line 1: not JSON: Expecting value; repair the array"),
    ],
)
def test_a_file_of_another_form_is_told(tmp_path: Path, content: str, message: str) -> None:
    """The place and the form that is expected; skipping bad questions does not hide it."""
    (tmp_path / "a.json").write_text(content)
    with pytest.raises(TaskError, match=message):
        read_examples(tmp_path / "a.json", task(skip_bad=True))
    with pytest.raises(TaskError, match="no such file"):
        read_examples(tmp_path / "b.json", task())
    (tmp_path / "b.json").write_bytes(b'{"data":\n"caf\xe9"}')
    with pytest.raises(TaskError, match=r"b\.json, line 2: not UTF-8: byte 0xe9"):
        read_examples(tmp_path / "b.json", task())


def test_a_file_without_answers_teaches_nothing() -> None:
    """One answered question is enough; none is an error."""
    none, one = (
        QuestionExample("q", "c", (), "1", "f"),
        QuestionExample("q", "c", (("c", 0),), "2", "f"),
    )
    assert collect_labels([none, one], "f") == ()
    with pytest.raises(TaskError, match="f: no question has an answer"):
        collect_labels([none, none], "f")


def test_inputs_are_those_of_the_paper(words: Tokenizer) -> None:
    """[CLS] question [SEP] context [SEP]; the answer's tokens, [CLS] for none; offsets."""
    examples = [
        QuestionExample("Who?", CONTEXT, (("greens and", 4),), "1", "f, one"),
        QuestionExample("Who?", CONTEXT, (), "2", "f, two"),
        QuestionExample("who " * 9, CONTEXT, (("reen", 5),), "3", "f, three"),
        QuestionExample("Who?", CONTEXT, (("s", 9),), "4", "f, four"),
    ]
    counts = ExampleCounts()
    found = encode_examples(examples, words, HEAD, task(max_question_length=5), counts)
    ids, segments = found.sequences[0][0]
    context = ["red", "green", "##s", "and", "blue", ",", "red", "again"]
    assert words.ids_to_tokens(ids) == ["[CLS]", "who", "[UNK]", "[SEP]", *context, "[SEP]"]
    assert segments == [0] * 4 + [1] * 9
    assert found.targets is not None
    assert np.concatenate(found.targets).tolist() == [[5, 7], [0, 0], [8, 8], [6, 6]]
    assert found.targets[0].dtype == np.int64
    window = found.family_data[0]
    assert window.first == 4
    assert [CONTEXT[a:b].lower() for a, b in window.offsets] == [
        "red", "green", "s", "and", "blue", ",", "red", "again"
    ]  # fmt: skip
    assert words.ids_to_tokens(found.sequences[2][0][0])[:7] == ["[CLS]", *["who"] * 5, "[SEP]"]
    assert (counts.num_truncated, found.is_truncated) == (1, [False, False, True, False])
    unknown = [QuestionExample("Who?", CONTEXT, None, "1", "f")]
    assert encode_examples(unknown, words, HEAD, task(), ExampleCounts()).targets is None


def test_windows_are_the_peers(tmp_path: Path, words: Tokenizer) -> None:
    """Ids, segments and offsets equal AutoTokenizer's with overflowing tokens and a stride."""
    from transformers import AutoTokenizer

    words.save(tmp_path)
    peer = AutoTokenizer.from_pretrained(tmp_path)
    for size in (1, 5, 6, 7, 13, 40):
        for stride in (1, 2, 4):
            context = " ".join(["red", "Greens", "and", "blue,"][n % 4] for n in range(size))
            example = QuestionExample("who and who?", context, (), "1", "f")
            found = encode_examples(
                [example], words, HEAD, task(length=16, stride=stride), ExampleCounts()
            )
            room = 16 - 3 - 4
            wanted = peer(
                example.question, context, truncation="only_second", max_length=16,
                stride=room - stride, return_overflowing_tokens=True, return_offsets_mapping=True,
            )  # fmt: skip
            assert [one[0] for one in found.sequences] == list(
                zip(wanted["input_ids"], wanted["token_type_ids"], strict=True)
            )
            for window, offsets in zip(found.family_data, wanted["offset_mapping"], strict=True):
                own = offsets[window.first : window.first + len(window.offsets)]
                assert [tuple(pair) for pair in window.offsets.tolist()] == own


@pytest.mark.parametrize("overlap", [0, 1, 3, 6])
def test_overlapping_windows_are_those_of_transformers(
    tmp_path: Path, words: Tokenizer, overlap: int
) -> None:
    """``task.overlap`` is transformers' stride, and every window may answer with all its tokens."""
    from transformers import AutoTokenizer

    words.save(tmp_path)
    peer = AutoTokenizer.from_pretrained(tmp_path)
    for size in (1, 9, 10, 11, 40):
        context = " ".join(["red", "Greens", "and", "blue,"][n % 4] for n in range(size))
        example = QuestionExample("who and who?", context, (), "1", "f")
        inputs = encode_examples(
            [example], words, HEAD, task(length=16, overlap=overlap), ExampleCounts()
        )
        expected = peer(
            example.question, context, truncation="only_second", max_length=16, stride=overlap,
            return_overflowing_tokens=True,
        )  # fmt: skip
        assert [ids for [(ids, _)] in inputs.sequences] == expected["input_ids"]
        assert all(window.owned.all() for window in inputs.family_data)


def test_a_large_overlap_of_short_windows_stays_cheap(words: Tokenizer) -> None:
    """Windows advance by an eighth of their tokens at least, not by a single token."""
    example = QuestionExample("who", "red " * 200, (), "1", "f")
    inputs = encode_examples([example], words, HEAD, task(length=36, overlap=128), ExampleCounts())
    assert len(inputs) == 1 + -(-(200 - 32) // 4)


def test_the_answer_stands_only_in_windows_that_hold_it_whole(words: Tokenizer) -> None:
    """A window that cuts it points at [CLS], as one without it does."""
    context = "red " * 6 + "green blue" + " red" * 6
    example = QuestionExample("who", context, (("green blue", 24),), "1", "f")
    found = encode_examples([example], words, HEAD, task(length=11, stride=2), ExampleCounts())
    assert found.targets is not None
    for own, target in zip(found.sequences, np.concatenate(found.targets).tolist(), strict=True):
        tokens = words.ids_to_tokens(own[0][0])
        whole = "green" in tokens and "blue" in tokens
        wanted = [tokens.index("green"), tokens.index("blue")] if whole else [0, 0]
        assert target == wanted
    assert len({tuple(one) for one in np.concatenate(found.targets).tolist()}) > 2


def test_a_question_longer_than_its_input_leaves_room(words: Tokenizer) -> None:
    """At the least length there is: half for the question, and every token of the context."""
    example = QuestionExample("who " * 70, CONTEXT, (("again", 25),), "1", "f")
    found = encode_examples([example], words, HEAD, task(length=8), ExampleCounts())
    shown = {pair for window in found.family_data for pair in map(tuple, window.offsets.tolist())}
    assert len(shown) == 8
    assert all(len(own[0][0]) <= 8 for own in found.sequences)


def test_the_longest_context_owns_a_token() -> None:
    """Each token is owned once, by the window that the original's rule names."""
    for size, room, stride in ((30, 9, 4), (31, 10, 3), (9, 9, 4), (17, 5, 9), (12, 7, 6)):
        parts = spans.split_into_windows(size, room, stride)
        owned = spans.assign_tokens_to_windows(parts)
        for token in range(size):
            best, name = -1.0, -1
            for number, (start, stop) in enumerate(parts):
                if start <= token < stop:
                    least = min(token - start, stop - 1 - token) + 0.01 * (stop - start)
                    if least > best:
                        best, name = least, number
            holding = [number for number, (start, stop) in enumerate(parts)
                       if start <= token < stop and owned[number][token - start]]  # fmt: skip
            assert holding == [name]


def by_brute_force(
    outputs: list[NDArray[np.float32]], inputs: ModelInputs, context: str, longest: int
) -> dict[str, float]:
    """Return the best score of each text that a question's windows allow, pair after pair."""
    found: dict[str, float] = {}
    for rows, window in zip(outputs, inputs.family_data, strict=True):
        size = len(window.offsets)
        for start in range(size):
            for end in range(start, min(start + longest, size)):
                if window.owned[start]:
                    text = context[window.offsets[start][0] : window.offsets[end][1]]
                    value = float(rows[window.first + start, 0]) + float(
                        rows[window.first + end, 1]
                    )
                    found[text] = max(value, found.get(text, -np.inf))
    return found


def test_the_best_spans_are_the_best(words: Tokenizer) -> None:
    """N-best of several windows equals trying each pair; no answer is the least of the windows."""
    chance = np.random.default_rng(3)
    contexts = [CONTEXT, "red green blue and again " * 7, "red " * 60]
    examples = [QuestionExample("who", one, None, "", "f") for one in contexts]
    inputs = encode_examples(examples, words, HEAD, task(length=16, stride=4), ExampleCounts())
    outputs = [chance.normal(size=(len(own[0][0]), 2)).astype(np.float32)
               for own in inputs.sequences]  # fmt: skip
    for longest, count in ((3, 5), (30, 20), (1, 1), (4, 1)):
        found = spans.find_best_spans(
            outputs, inputs.family_data, contexts, max_answer_tokens=longest, num_spans=count
        )
        for number, (one, context) in enumerate(zip(found, contexts, strict=True)):
            own = [
                place for place, window in enumerate(inputs.family_data) if window.example == number
            ]
            part = ModelInputs([], [], [], family_data=[inputs.family_data[place] for place in own])
            every = by_brute_force([outputs[place] for place in own], part, context, longest)
            best = sorted(every.items(), key=lambda item: -item[1])[:count]
            assert [span.text for span in one.spans] == [text for text, _ in best]
            assert [span.score for span in one.spans] == pytest.approx([value for _, value in best])
            assert all(context[span.start : span.end] == span.text for span in one.spans)
            assert one.null_score == pytest.approx(min(outputs[place][0].sum() for place in own))


@pytest.mark.parametrize(
    ("strip_accents", "text", "answer"),
    [
        (True, "Ein CAFE\u0301, bitte", "CAFE\u0301"),
        (True, "Das Café, bitte", "Café"),
        (True, "나는 학교에 갔다", "학교에"),
        (False, "나는 학교에 갔다", "학교에"),
        (False, "İstanbul a\u200bb 𝔘 ok", "a\u200bb"),
        (True, "x 𝔘𝔘 y", "𝔘𝔘"),
    ],
)
def test_an_answer_comes_back_as_it_stands(strip_accents: bool, text: str, answer: str) -> None:
    """Lowered, stripped of accents, in jamo or beyond 16 bits: its own characters, each of them."""
    pieces = {sign for one in (text, "cafe나는") for sign in one.lower() if not sign.isspace()}
    pieces |= set("acfe학교에")
    vocab = (*SPECIAL_TOKENS, *sorted(pieces), *(f"##{piece}" for piece in sorted(pieces)))
    tokenizer = Tokenizer(TokenizerSpec(vocab=vocab, strip_accents=strip_accents))
    start = text.index(answer)
    example = QuestionExample("a", text, ((answer, start),), "1", "f")
    inputs = encode_examples([example], tokenizer, HEAD, task(), ExampleCounts())
    assert inputs.targets is not None
    assert inputs.targets[0].tolist() != [[0, 0]]
    rows = np.zeros((len(inputs.sequences[0][0][0]), 2), np.float32)
    rows[inputs.targets[0][0], [0, 1]] = 5.0
    (found,) = spans.find_best_spans(
        [rows], inputs.family_data, [text], max_answer_tokens=30, num_spans=1
    )
    assert (found.spans[0].text, found.spans[0].start) == (answer, start)


def test_an_answer_of_no_token_is_no_target(words: Tokenizer) -> None:
    """What the tokenizer takes away teaches nothing, no answer neither; another answer does."""
    context, gone = "red \ufffd blue", ("\ufffd", 4)
    answers = [(gone,), (gone, ("blue", 6)), ()]
    examples = [
        QuestionExample("who", context, own, str(number), "f") for number, own in enumerate(answers)
    ]
    inputs = encode_examples(examples, words, HEAD, task(), ExampleCounts())
    assert inputs.targets is not None
    assert [own.tolist() for own in inputs.targets] == [[], [[4, 4]], [[0, 0]]]
    assert inputs.indices_with_target() == [1, 2]
    rows = [np.zeros((len(ids), 2), np.float32) for [(ids, _)] in inputs.sequences]
    assert 0 <= compute_metrics(rows, inputs, examples, HEAD, task())["f1"] <= 1


def test_a_context_of_no_token_is_no_answer(words: Tokenizer) -> None:
    """It has a window all the same, and its answer is nothing."""
    inputs = encode_examples(
        [QuestionExample("who", "\ufffd", None, "", "f")], words, HEAD, task(), ExampleCounts()
    )
    (found,) = spans.find_best_spans(
        [np.ones((4, 2), np.float32)],
        inputs.family_data,
        ["\ufffd"],
        max_answer_tokens=3,
        num_spans=2,
    )
    assert [(span.text, span.score) for span in found.spans] == [("", 2.0)]


def test_losses_are_those_of_each_window(words: Tokenizer) -> None:
    """The mean of two cross-entropies over a window's own tokens, whatever stands beside it."""
    examples = [QuestionExample("who", CONTEXT, (("BLUE, red", 15),), "1", "f"),
                QuestionExample("who", "red", (), "2", "f"),
                QuestionExample("who", "red and", (("red", 0),), "3", "f")]  # fmt: skip
    inputs = encode_examples(examples, words, HEAD, task(), ExampleCounts())
    part = inputs.make_micro_batch([0, 1, 2])
    assert part.token_indices is not None
    assert torch.equal(part.token_indices, torch.arange(len(part.packed.ids)))
    torch.manual_seed(0)
    outputs = torch.randn(len(part.packed.ids), 2, requires_grad=True)
    found = compute_losses(outputs, part, HEAD)
    sizes = [inputs.num_tokens(number) for number in range(3)]
    for rows, target, one in zip(torch.split(outputs, sizes), part.targets, found, strict=True):
        wanted = -(rows[:, 0].log_softmax(0)[target[0]] + rows[:, 1].log_softmax(0)[target[1]]) / 2
        torch.testing.assert_close(one, wanted)
    (gradient,) = torch.autograd.grad(found.sum(), outputs)
    assert gradient.isfinite().all()


def test_scores_come_from_the_best_span(words: Tokenizer) -> None:
    """Right spans and right silence score 1; the threshold parts the two kinds of questions."""
    examples = [QuestionExample("who", CONTEXT, (("Red", 0), ("BLUE", 15)), "1", "f"),
                QuestionExample("who", CONTEXT, (), "2", "f")]  # fmt: skip
    inputs = encode_examples(examples, words, HEAD, task(), ExampleCounts())
    rows = [np.zeros((inputs.num_tokens(number), 2), np.float32) for number in range(2)]
    rows[0][7] = 4.0  # "blue"
    rows[1][0] = 4.0
    found = compute_metrics(rows, inputs, examples, HEAD, task())
    assert (found["f1"], found["exact"], found["NoAns_exact"]) == (1.0, 1.0, 1.0)
    assert -8 < found["null_threshold"] < 8
    assert compute_metrics(rows, inputs, examples, HEAD, task(null_threshold=9.0))["f1"] == 0.5
    alone = compute_metrics(rows[:1], encode_examples(examples[:1], words, HEAD, task(), ExampleCounts()), examples[:1],
                  HEAD, task())  # fmt: skip
    assert alone == {"f1": 1.0, "exact": 1.0}


@pytest.mark.data
def test_real_answers_map_to_tokens_and_back(tmp_path: Path, shared_text: Path) -> None:
    """SQuAD's dev set: 99 % of the answers, or more, are what their tokens stand for."""
    with tarfile.open(shared_text.parent / "labelled.tar.xz") as pack:
        wanted = {"labelled/squad/dev-v1.1.json", "labelled/vocab/bert-base-uncased.txt"}
        for member in pack:
            if member.name in wanted:
                pack.extract(member, tmp_path, filter="data")
    (tmp_path / "labelled/vocab/bert-base-uncased.txt").rename(tmp_path / "vocab.txt")
    tokenizer = Tokenizer.load(tmp_path / "vocab.txt")
    examples, counts = read_examples(tmp_path / "labelled/squad/dev-v1.1.json", task())
    assert counts.num_used == counts.num_read == 10_570
    inputs = encode_examples(examples, tokenizer, HEAD, task(length=384), ExampleCounts())
    assert inputs.targets is not None
    outputs = []
    for own, target in zip(inputs.sequences, inputs.targets, strict=True):
        rows = np.zeros((len(own[0][0]), 2), np.float32)
        rows[target[0], [0, 1]] = 9.0
        outputs.append(rows)
    contexts = [example.context for example in examples]
    found = spans.find_best_spans(
        outputs, inputs.family_data, contexts, max_answer_tokens=80, num_spans=1
    )
    hits = [
        squad.normalize_answer(one.spans[0].text) == squad.normalize_answer(example.answers[0][0])
        for one, example in zip(found, examples, strict=True)
        if example.answers
    ]
    assert len(hits) == 10_570
    assert np.mean(hits) >= 0.99
