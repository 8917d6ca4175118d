"""The held-out split: which documents are held out, and what share of the tokens they have."""

from collections.abc import Iterable, Sequence

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from bertsmith.data.held_out_split import DocumentSizes, HeldOutRule, choose_held_out


def make_sizes(
    documents: Sequence[Sequence[int]], hashes: Iterable[int] | None = None
) -> DocumentSizes:
    """Return the sizes and hashes of documents.

    Args:
        documents: For each document, the number of tokens in each sentence.
        hashes: Hash of each document; None for random hashes.
    """
    if hashes is None:
        rng = np.random.default_rng(len(documents))
        hashes = rng.integers(0, 1 << 64, len(documents), dtype=np.uint64)
    return DocumentSizes(
        np.array(list(hashes), np.uint64),
        np.array([len(document) for document in documents], np.int64),
        np.array([tokens for document in documents for tokens in document], np.int64),
    )


def choose_rule(sizes: DocumentSizes, share: float | None) -> HeldOutRule:
    """Choose the held-out rule for a corpus with a single shard."""
    return choose_held_out(lambda: [sizes], share)


def compute_held_out_share(sizes: DocumentSizes, share: float | None) -> float:
    """Return the actual share of held-out tokens for a requested share."""
    assignment = choose_rule(sizes, share).assign(sizes)
    held_out_tokens = sizes.tokens_per_sentence[assignment.is_held_out].sum()
    return float(held_out_tokens / sizes.tokens_per_sentence.sum())


def draw_sentence_sizes(tokens: int, max_tokens: int = 40, seed: int = 0) -> list[int]:
    """Return the sizes of random sentences with about ``tokens`` tokens in total."""
    rng = np.random.default_rng([tokens, seed])
    return [int(size) for size in rng.integers(1, max_tokens + 1, 2 * tokens // max_tokens + 1)]


def test_short_documents_are_held_out_whole() -> None:
    """If all documents are short, those with the smallest hashes are held out and none is cut."""
    rng = np.random.default_rng(0)
    sizes = make_sizes([draw_sentence_sizes(int(size)) for size in rng.integers(20, 2000, 2000)])
    rule = choose_rule(sizes, 0.05)
    assert not len(rule.cut_hashes)
    expected = np.repeat(sizes.hashes < np.uint64(rule.hash_limit), sizes.sentences_per_document)
    assert (rule.assign(sizes).is_held_out == expected).all()
    assert compute_held_out_share(sizes, 0.05) == pytest.approx(0.05, rel=0.01)


def test_default_share_depends_on_the_size_of_the_corpus() -> None:
    """By default 1 % is held out, or 131,072 tokens if that is more, but at most 5 %."""
    rng = np.random.default_rng(0)
    for num_documents, tokens in ((10_000, 2000), (4000, 2000), (300, 500)):
        sentence_sizes = rng.integers(1, tokens // 10, num_documents)
        sizes = make_sizes([[int(size)] * 20 for size in sentence_sizes])
        total = int(sizes.tokens_per_sentence.sum())
        expected = max(0.01, min(0.05, (1 << 17) / total))
        assert compute_held_out_share(sizes, None) == pytest.approx(expected, rel=0.03)
    assert compute_held_out_share(sizes, 0.0) == 0.0


@pytest.mark.parametrize(
    "documents",
    [
        [draw_sentence_sizes(150_000, seed=number) for number in range(6)],
        [draw_sentence_sizes(150_000), *([[12, 9]] * 20)],
        [draw_sentence_sizes(800_000)],
        [draw_sentence_sizes(6_000)],
        [draw_sentence_sizes(6_000, seed=number) for number in range(3)],
    ],
    ids=["six-novels", "one-long-and-20-short", "one-novel", "300-sentences", "three-stories"],
)
@pytest.mark.parametrize("share", [0.01, 0.1, None])
def test_few_long_documents_are_cut(documents: list[list[int]], share: float | None) -> None:
    """Long documents are cut to meet the request, with at least two documents in each split."""
    sizes = make_sizes(documents)
    total = int(sizes.tokens_per_sentence.sum())
    assignment = choose_rule(sizes, share).assign(sizes)
    requested = share or max(0.01, min(0.05, (1 << 17) / total))
    # If a few hundred tokens are requested, the minimum of two parts can be more than the request.
    upper = max(1.2 * requested, 300 / total)
    assert 0.8 * requested <= compute_held_out_share(sizes, share) <= upper
    assert len(assignment.train_document_sizes) >= 2
    assert len(assignment.held_out_document_sizes) >= 2


#: Documents as (tokens, maximum tokens per sentence, copies).
DOCUMENTS = st.lists(
    st.tuples(st.integers(1, 30_000), st.integers(1, 60), st.integers(1, 3)),
    min_size=1,
    max_size=30,
)


@settings(max_examples=150)
@given(DOCUMENTS, st.floats(0.005, 0.99), st.integers(0, 1000))
def test_held_out_share_is_near_the_request(
    documents: list[tuple[int, int, int]], share: float, seed: int
) -> None:
    """The held-out share is 0.8 to 1.2 times a request of at least 256 tokens.

    The lower bound holds if no sentence, with its copies, has over a sixteenth of the request.
    """
    rng = np.random.default_rng(seed)
    sentence_sizes: list[list[int]] = []
    hashes: list[int] = []
    for tokens, max_sentence_tokens, copies in documents:
        sentence_sizes += [draw_sentence_sizes(tokens, max_sentence_tokens, seed)] * copies
        hashes += [int(rng.integers(0, 1 << 64, dtype=np.uint64))] * copies
    sizes = make_sizes(sentence_sizes, hashes)
    total = int(sizes.tokens_per_sentence.sum())
    assignment = choose_rule(sizes, share).assign(sizes)
    num_held_out = int(sizes.tokens_per_sentence[assignment.is_held_out].sum())
    train_sizes = assignment.train_document_sizes
    held_out_sizes = assignment.held_out_document_sizes
    if share * total >= 256:
        assert num_held_out <= 1.2 * share * total
        # A sentence has at most three copies.
        max_tokens_with_copies = 3 * max(max_tokens for _, max_tokens, _ in documents)
        if max_tokens_with_copies <= min(share, 1 - share) * total / 16:
            assert num_held_out >= 0.8 * share * total
    assert not num_held_out or min(len(train_sizes), len(held_out_sizes)) >= 2
    # Every sentence is in one document of its split.
    assert held_out_sizes.sum() == assignment.is_held_out.sum()
    assert train_sizes.sum() == (~assignment.is_held_out).sum()
    assert (train_sizes > 0).all()
    assert (held_out_sizes > 0).all()
    # Corresponding sentences of copies are in the same split.
    ends = np.cumsum(sizes.sentences_per_document)
    splits: dict[int, list[bool]] = {}
    for value, end, size in zip(sizes.hashes, ends, sizes.sentences_per_document, strict=True):
        is_held_out = assignment.is_held_out[end - size : end].tolist()
        assert splits.setdefault(int(value), is_held_out) == is_held_out


def divide_into_two_shards(sizes: DocumentSizes, number: int) -> list[DocumentSizes]:
    """Return the first ``number`` documents and the remaining documents, as two shards."""
    sentence = int(sizes.sentences_per_document[:number].sum())
    hashes, sentences_per_document, tokens_per_sentence = sizes
    return [
        DocumentSizes(
            hashes[:number], sentences_per_document[:number], tokens_per_sentence[:sentence]
        ),
        DocumentSizes(
            hashes[number:], sentences_per_document[number:], tokens_per_sentence[sentence:]
        ),
    ]


def test_result_does_not_depend_on_the_shards() -> None:
    """The rule and the assignment are the same however the documents are grouped."""
    sizes = make_sizes([draw_sentence_sizes(30_000, seed=number) for number in range(8)])
    expected_rule = choose_rule(sizes, 0.02)
    expected = expected_rule.assign(sizes).is_held_out
    for number in range(len(sizes.hashes) + 1):
        shards = divide_into_two_shards(sizes, number)
        rule = choose_held_out(lambda shards=shards: shards, 0.02)  # type: ignore[misc]
        assert rule.hash_limit == expected_rule.hash_limit
        is_held_out = [rule.assign(shard).is_held_out for shard in shards]
        assert (np.concatenate(is_held_out) == expected).all()


def test_training_documents_end_at_held_out_parts() -> None:
    """No training document contains text from both sides of a held-out part."""
    sizes = make_sizes([draw_sentence_sizes(200_000)])
    assignment = choose_rule(sizes, 0.05).assign(sizes)
    run_ends = np.flatnonzero(np.diff(assignment.is_held_out))
    run_sizes = np.diff(np.concatenate([[-1], run_ends, [len(assignment.is_held_out) - 1]]))
    # A run is a maximal sequence of sentences of the same split, so the splits alternate.
    first_training_run = int(assignment.is_held_out[0])
    assert assignment.train_document_sizes.tolist() == run_sizes[first_training_run::2].tolist()


def test_single_training_run_is_several_documents() -> None:
    """If the training text of a single document is contiguous, its parts are not merged."""
    num_unmerged = 0
    # The hash of the document determines which of its parts are held out.
    for number in range(300):
        sizes = make_sizes([[8] * 24], [number << 48])
        rule = choose_rule(sizes, 0.05)
        assignment = rule.assign(sizes)
        num_unmerged += not rule.merge_training_parts
        assert len(assignment.train_document_sizes) >= 2
        assert len(assignment.held_out_document_sizes) >= 2
    assert num_unmerged


@pytest.mark.parametrize(
    "documents", [[], [[5]], [[5], [6], [7]], [[5, 5, 5]], [[5]] * 9, [[70_000, 3, 90_000]]]
)
def test_nothing_is_held_out_of_a_tiny_corpus(documents: list[list[int]]) -> None:
    """Nothing is held out if two held-out parts and two training parts are impossible."""
    sizes = make_sizes(documents, [sum(document) << 32 for document in documents])
    assert not choose_rule(sizes, 0.01).assign(sizes).is_held_out.any()


def test_document_with_many_copies_is_cut_more_finely() -> None:
    """A document with 50 copies is cut into smaller parts, to hold out 1 % with all copies."""
    copies = 50
    sizes = make_sizes([draw_sentence_sizes(10_000)] * copies, [1 << 40] * copies)
    assert compute_held_out_share(sizes, 0.01) == pytest.approx(0.01, rel=0.2)
