"""Encoding and scoring tagged sentences."""

import time

import numpy as np
import pytest
from numpy.typing import NDArray

from bertsmith.bundle import HeadConfig
from bertsmith.errors import TaskError
from bertsmith.tasks.conll import TaggedSentence
from bertsmith.tasks.inputs import ExampleCounts, ModelInputs
from bertsmith.tasks.tagging import (
    collect_labels,
    compute_class_report,
    compute_metrics,
    encode_examples,
    to_unit_tags,
)
from bertsmith.text.tokenizer_spec import SPECIAL_TOKENS, TokenizerSpec
from bertsmith.text.wordpiece import Tokenizer
from tests.tasks.conftest import CHARACTERS, ENTITIES


@pytest.fixture
def tokenizer() -> Tokenizer:
    """A lowercasing tokenizer with English words and Korean syllables."""
    vocabulary = ("eu", "rejects", "peter", "black", "##burn", "oslo", "서울", "##에서", "살", ".",
                  "##s")  # fmt: skip
    return Tokenizer(TokenizerSpec(vocab=(*SPECIAL_TOKENS, *vocabulary)))


def test_document_can_have_more_inputs_than_sentences(tokenizer: Tokenizer) -> None:
    """Each input of a long sentence can be selected."""
    example = make_sentence(" ".join(["oslo"] * 20), "O " * 20)
    task = ENTITIES.model_copy(update={"context": "document", "max_seqlen": 12})
    inputs = encode_examples([example], tokenizer, HEAD, task, ExampleCounts())
    assert len(inputs) == 4
    assert inputs.select([3]).sequences == [inputs.sequences[3]]


def make_sentence(text: str, tags: str, document: int = 0) -> TaggedSentence:
    """Return a sentence from words and tags separated by spaces."""
    units, start = [], 0
    for word in text.split(" "):
        units.append((start, start + len(word)))
        start += len(word) + 1
    return TaggedSentence(text, tuple(units), tuple(tags.split()), document, "f, line 1")


HEAD = HeadConfig("entities", ("O", "B-PER", "I-PER", "B-ORG", "I-ORG"))


def test_first_token_of_each_word_is_predicted(tokenizer: Tokenizer) -> None:
    """Inputs are [CLS] sentence [SEP]; a word without tokens has no prediction."""
    examples = [make_sentence("Peter Blackburn \u200b rejects EU", "B-PER I-PER O O B-ORG")]
    inputs = encode_examples(examples, tokenizer, HEAD, ENTITIES, ExampleCounts())
    [[(ids, segments)]] = inputs.sequences
    tokens = tokenizer.ids_to_tokens(ids)
    assert tokens == ["[CLS]", "peter", "black", "##burn", "rejects", "eu", "[SEP]"]
    assert set(segments) == {0}
    assert inputs.token_indices == [[1, 2, 4, 5]]
    assert inputs.targets is not None
    assert inputs.targets[0].tolist() == [1, 2, 0, 3]


def test_last_token_of_each_word_is_predicted(tokenizer: Tokenizer) -> None:
    """With ``tagged_token="last"``, the last token of a word has its tag."""
    task = ENTITIES.model_copy(update={"tagged_token": "last"})
    examples = [make_sentence("Blackburn \u200b rejects EUs", "B-PER O O B-ORG")]
    inputs = encode_examples(examples, tokenizer, HEAD, task, ExampleCounts())
    [[(ids, _)]] = inputs.sequences
    tokens = tokenizer.ids_to_tokens(ids)
    assert tokens == ["[CLS]", "black", "##burn", "rejects", "eu", "##s", "[SEP]"]
    assert inputs.token_indices == [[2, 3, 5]]
    assert inputs.targets is not None
    assert inputs.targets[0].tolist() == [1, 0, 3]


def make_correct_outputs(inputs: ModelInputs, head: HeadConfig) -> list[NDArray[np.float32]]:
    """Return outputs whose argmax is the target of every predicted token."""
    assert inputs.targets is not None
    return [np.eye(head.num_outputs, dtype=np.float32)[targets] for targets in inputs.targets]


@pytest.mark.parametrize("tagged_token", ["first", "last"])
@pytest.mark.parametrize("context", ["sentence", "document"])
@pytest.mark.parametrize("length", [8, 11, 64])
def test_correct_outputs_score_one_unless_truncated(
    tokenizer: Tokenizer, context: str, length: int, tagged_token: str
) -> None:
    """With document context nothing is truncated; with sentence context truncation lowers F1."""
    rng = np.random.default_rng(3)
    pairs = [("peter blackburn", "B-PER I-PER"), ("eu", "B-ORG"), ("rejects", "O"), ("oslo", "O")]
    examples = []
    for index in range(40):
        sentence_pairs = [pairs[choice] for choice in rng.integers(0, 4, rng.integers(1, 9))]
        text = " ".join(words for words, _ in sentence_pairs)
        tags = " ".join(pair_tags for _, pair_tags in sentence_pairs)
        examples.append(make_sentence(text, tags, document=index // 7))
    changes = {"context": context, "max_seqlen": length, "tagged_token": tagged_token}
    task = ENTITIES.model_copy(update=changes)
    counts = ExampleCounts()
    inputs = encode_examples(examples, tokenizer, HEAD, task, counts)
    assert max(len(ids) for [(ids, _)] in inputs.sequences) <= length
    scores = compute_metrics(make_correct_outputs(inputs, HEAD), inputs, examples, HEAD, task)
    if context == "document" or length == 64:
        assert scores == {"f1": 1.0, "accuracy": 1.0}
        assert counts.num_truncated == 0
    else:
        assert counts.num_truncated > 0
        assert scores["f1"] < 1.0


def test_document_context_fills_the_inputs(tokenizer: Tokenizer) -> None:
    """Each input is as long as possible and contains tokens of a single document."""
    examples = [make_sentence("eu", "B-ORG", 0) for _ in range(30)]
    examples += [make_sentence("oslo", "O", 1) for _ in range(3)]
    task = ENTITIES.model_copy(update={"context": "document", "max_seqlen": 12})
    inputs = encode_examples(examples, tokenizer, HEAD, task, ExampleCounts())
    windows = [tokenizer.ids_to_tokens(ids)[1:-1] for [(ids, _)] in inputs.sequences]
    # Without [CLS] and [SEP], an input has 10 tokens. The tags of 5 of them are predicted, so the
    # first document, which has 30 tokens, needs 6 inputs.
    assert [len(tokens) for tokens in windows] == [10] * 6 + [3]
    assert all(len(set(tokens)) == 1 for tokens in windows)
    assert inputs.token_indices is not None
    # In the middle of a document the predicted tokens are in the middle of the input.
    assert inputs.token_indices[2] == [3, 4, 5, 6, 7]
    assert sum(map(len, inputs.token_indices)) == 30 + 3


@pytest.mark.parametrize("context", ["sentence", "document"])
def test_document_without_tokens_is_predicted_as_outside(
    tokenizer: Tokenizer, context: str
) -> None:
    """The model predicts no tag, and the metrics are those of predicting O for each word."""
    task = ENTITIES.model_copy(update={"context": context})
    examples = [make_sentence("\u200b \u200b", "O B-PER", 1)]
    inputs = encode_examples(examples, tokenizer, HEAD, task, ExampleCounts())
    tokens = [tokenizer.ids_to_tokens(ids) for [(ids, _)] in inputs.sequences]
    assert tokens == [["[CLS]", "[SEP]"]]
    assert inputs.token_indices == [[]]
    outputs = [np.empty((0, HEAD.num_outputs), np.float32)]
    scores = compute_metrics(outputs, inputs, examples, HEAD, task)
    assert scores == {"f1": 0.0, "accuracy": 0.5}


def test_long_documents_take_linear_time(tokenizer: Tokenizer) -> None:
    """16 times the words take less than 60 times the CPU time; quadratic code would take 256.

    CPU time is measured because it does not depend on other processes.
    """
    task = ENTITIES.model_copy(update={"context": "document", "max_seqlen": 16})
    sentence_task = ENTITIES.model_copy(update={"max_seqlen": 16})

    def measure_cpu_seconds(num_words: int) -> float:
        """Return the smallest CPU time of three measurements."""
        document = make_sentence(" ".join(["peter"] * num_words), " ".join(["O"] * num_words))
        durations = []
        for _ in range(3):
            start = time.process_time()
            encode_examples([document], tokenizer, HEAD, task, ExampleCounts())
            inputs = encode_examples([document], tokenizer, HEAD, sentence_task, ExampleCounts())
            alignments = inputs.decoding_data
            token_tags = ["O"] * len(alignments[0].predicted_token_indices)
            list(to_unit_tags([document], alignments, token_tags, "entities"))
            durations.append(time.process_time() - start)
        return min(durations)

    assert measure_cpu_seconds(16_000) < 60 * measure_cpu_seconds(1000)


def test_entities_are_reported_by_type_and_tags_by_tag(tokenizer: Tokenizer) -> None:
    """Entities are scored by type; plain tags are scored by tag, with a confusion matrix."""
    example = make_sentence("Peter rejects Oslo", "B-PER O B-LOC")
    head = HeadConfig("tags", ("O", "B-PER", "B-LOC"))
    inputs = encode_examples([example], tokenizer, head, ENTITIES, ExampleCounts())
    outputs = [np.eye(3, dtype=np.float32)[[1, 0, 1]]]
    tag_report = compute_class_report(outputs, inputs, [example], head, ENTITIES)
    assert tag_report["confusion"] == {"O": {"O": 1}, "B-PER": {"B-PER": 1}, "B-LOC": {"B-PER": 1}}
    entity_head = HeadConfig("entities", head.labels)
    entity_report = compute_class_report(outputs, inputs, [example], entity_head, ENTITIES)
    assert {name: scores["recall"] for name, scores in entity_report["classes"].items()} == {
        "LOC": 0.0,
        "PER": 1.0,
    }
    assert "confusion" not in entity_report


@pytest.mark.filterwarnings("ignore")
def test_character_macro_f1_equals_klue(tokenizer: Tokenizer) -> None:
    """The metric equals scikit-learn's macro F1 with zero_division=1, as in KLUE's baseline."""
    from sklearn.metrics import f1_score

    labels = ("O", "B-LC", "I-LC", "B-PS", "I-PS")
    head = HeadConfig("entities", labels)
    units = tuple((index, index + 1) for index in range(6))
    tags = ("B-LC", "I-LC", "O", "O", "O", "B-LC")
    example = TaggedSentence("서울에서 살", units, tags, 0, "f")
    names = ["char_macro_f1", "recall:LC", "f1:PS"]
    task = CHARACTERS.model_copy(update={"metrics": names})
    inputs = encode_examples([example], tokenizer, head, task, ExampleCounts())
    rng = np.random.default_rng(0)
    for _ in range(20):
        outputs = [
            rng.random((len(indices), 5)).astype(np.float32)
            for indices in inputs.token_indices or ()
        ]
        token_tags = [labels[index] for index in np.concatenate(outputs).argmax(-1)]
        (predicted,) = to_unit_tags([example], inputs.decoding_data, token_tags, "entities")
        scores = compute_metrics(outputs, inputs, [example], head, task)
        expected = f1_score(tags, predicted, labels=labels, average="macro", zero_division=1)
        assert scores["char_macro_f1"] == pytest.approx(float(expected))
        report = compute_class_report(outputs, inputs, [example], head, task)
        assert scores["recall:LC"] == report["classes"]["LC"]["recall"]
        assert list(scores) == names


def test_characters_of_one_token_share_an_entity(tokenizer: Tokenizer) -> None:
    """Only the tag of the first character is predicted; the others continue its entity."""
    text = "서울에서 살."
    tags = ("B-LC", "I-LC", "I-LC", "I-LC", "I-LC", "I-LC", "O")
    units = tuple((index, index + 1) for index in range(len(text)))
    example = TaggedSentence(text, units, tags, 0, "f")
    head = HeadConfig("entities", ("O", "B-LC", "I-LC"))
    inputs = encode_examples([example], tokenizer, head, CHARACTERS, ExampleCounts())
    assert inputs.targets is not None
    assert inputs.targets[0].tolist() == [1, 2, 2, 0]
    outputs = make_correct_outputs(inputs, head)
    scores = compute_metrics(outputs, inputs, [example], head, CHARACTERS)
    assert scores["accuracy"] == 1.0
    # A space is outside if the character after it is outside.
    outputs = [np.eye(3, dtype=np.float32)[[1, 2, 0, 0]]]
    scores = compute_metrics(outputs, inputs, [example], head, CHARACTERS)
    assert scores["accuracy"] == pytest.approx(5 / 7)


def test_single_tag_is_rejected() -> None:
    """Training needs at least two different tags."""
    with pytest.raises(TaskError, match="every tag is 'O'"):
        collect_labels([make_sentence("eu", "O")], "f")
