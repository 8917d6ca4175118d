"""Which text is held out, and how much of it."""

from collections.abc import Iterable, Sequence

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from bertsmith.data.held_out_split import DocumentSizes, HeldOutRule, choose_held_out


def corpus(
    documents: Sequence[Sequence[int]], hashes: Iterable[int] | None = None
) -> DocumentSizes:
    """Return the sizes of documents, each a list of tokens per sentence, with random hashes."""
    if hashes is None:
        hashes = np.random.default_rng(len(documents)).integers(0, 1 << 63, len(documents)) * 2
    return DocumentSizes(
        np.array(list(hashes), np.uint64),
        np.array([len(document) for document in documents], np.int64),
        np.array([tokens for document in documents for tokens in document], np.int64),
    )


def choose(lengths: DocumentSizes, share: float | None) -> HeldOutRule:
    """Choose the rule for one shard."""
    return choose_held_out(lambda: [lengths], share)


def held_out_share(lengths: DocumentSizes, share: float | None) -> float:
    """Return the share of the tokens that is held out."""
    assignment = choose(lengths, share).assign(lengths)
    held_out = lengths.sentence_sizes[assignment.held_out].sum()
    return float(held_out / lengths.sentence_sizes.sum())


def sentences(tokens: int, longest: int = 40, seed: int = 0) -> list[int]:
    """Return the sizes of random sentences that have about so many tokens."""
    chance = np.random.default_rng([tokens, seed])
    return [int(size) for size in chance.integers(1, longest + 1, 2 * tokens // longest + 1)]


def test_short_documents_are_held_out_whole() -> None:
    """Of many short documents those with the smallest hashes are held out, and nothing is cut."""
    chance = np.random.default_rng(0)
    lengths = corpus([sentences(int(size)) for size in chance.integers(20, 2000, 2000)])
    rule = choose(lengths, 0.05)
    assert not len(rule.cut_hashes)
    expected = np.repeat(lengths.hashes < np.uint64(rule.hash_limit), lengths.document_sizes)
    assert (rule.assign(lengths).held_out == expected).all()
    assert held_out_share(lengths, 0.05) == pytest.approx(0.05, rel=0.01)


def test_default_share() -> None:
    """By default 1 % is held out, more in small corpora: up to 131,072 tokens or 5 %."""
    chance = np.random.default_rng(0)
    for documents, tokens in ((10_000, 2000), (4000, 2000), (300, 500)):
        lengths = corpus([[int(n)] * 20 for n in chance.integers(1, tokens // 10, documents)])
        total = int(lengths.sentence_sizes.sum())
        share = max(0.01, min(0.05, (1 << 17) / total))
        assert held_out_share(lengths, None) == pytest.approx(share, rel=0.03)
    assert held_out_share(lengths, 0.0) == 0.0


@pytest.mark.parametrize(
    "documents",
    [
        [sentences(150_000, seed=number) for number in range(6)],
        [sentences(150_000), *([[12, 9]] * 20)],
        [sentences(800_000)],
        [sentences(6_000)],
        [sentences(6_000, seed=number) for number in range(3)],
    ],
    ids=["six-novels", "one-long-and-20-short", "one-novel", "300-sentences", "three-stories"],
)
@pytest.mark.parametrize("share", [0.01, 0.1, None])
def test_few_documents(documents: list[list[int]], share: float | None) -> None:
    """Long documents are cut, so that few of them meet the request, with two on either side."""
    lengths = corpus(documents)
    total = int(lengths.sentence_sizes.sum())
    assignment = choose(lengths, share).assign(lengths)
    requested = share or max(0.01, min(0.05, (1 << 17) / total))
    # Of a few hundred tokens two parts are held out, whatever the request.
    upper = max(1.2 * requested, 300 / total)
    assert 0.8 * requested <= held_out_share(lengths, share) <= upper
    assert min(len(assignment.train_document_sizes), len(assignment.held_out_document_sizes)) >= 2


DOCUMENTS = st.lists(
    st.tuples(st.integers(1, 30_000), st.integers(1, 60), st.integers(1, 3)),
    min_size=1,
    max_size=30,
)


@settings(max_examples=150)
@given(DOCUMENTS, st.floats(0.005, 0.99), st.integers(0, 1000))
def test_share_of_any_corpus(
    documents: list[tuple[int, int, int]], share: float, seed: int
) -> None:
    """The held-out share is 0.8 to 1.2 times the request, which counts at least 256 tokens.

    The lower bound holds where no sentence, with its copies, is longer than a sixteenth of it.
    """
    chance = np.random.default_rng(seed)
    made = [
        (sentences(tokens, longest, seed), int(chance.integers(0, 1 << 64, dtype=np.uint64)))
        for tokens, longest, copies in documents
        for _ in range(copies)
    ]
    lengths = corpus([one for one, _ in made], [one for _, one in made])
    # Copies: the same document again, in the same place of the list.
    first = np.concatenate([[number] * copies for number, (_, _, copies) in enumerate(documents)])
    lengths = lengths._replace(hashes=lengths.hashes[np.searchsorted(first, first)])
    total = int(lengths.sentence_sizes.sum())
    rule = choose(lengths, share)
    assignment = rule.assign(lengths)
    held_out = int(lengths.sentence_sizes[assignment.held_out].sum())
    if share * total >= 256:
        assert held_out <= 1.2 * share * total
        if 16 * 3 * max(longest for _, longest, _ in documents) <= min(share, 1 - share) * total:
            assert held_out >= 0.8 * share * total
    assert (
        not held_out
        or min(len(assignment.train_document_sizes), len(assignment.held_out_document_sizes)) >= 2
    )
    # Every sentence is in one document of its side.
    assert assignment.held_out_document_sizes.sum() == assignment.held_out.sum()
    assert assignment.train_document_sizes.sum() == (~assignment.held_out).sum()
    assert (assignment.train_document_sizes > 0).all()
    assert (assignment.held_out_document_sizes > 0).all()
    # Copies are on the same side, sentence by sentence.
    ends = np.cumsum(lengths.document_sizes)
    sides: dict[int, list[bool]] = {}
    for value, end, size in zip(lengths.hashes, ends, lengths.document_sizes, strict=True):
        side = assignment.held_out[end - size : end].tolist()
        assert sides.setdefault(int(value), side) == side


def split_at(lengths: DocumentSizes, number: int) -> list[DocumentSizes]:
    """Return the documents before and from ``number`` on, as two shards."""
    at = int(lengths.document_sizes[:number].sum())
    hashes, documents, tokens = lengths
    return [
        DocumentSizes(hashes[:number], documents[:number], tokens[:at]),
        DocumentSizes(hashes[number:], documents[number:], tokens[at:]),
    ]


def test_shards_do_not_matter() -> None:
    """The rule and the sides are the same however documents are grouped into shards."""
    lengths = corpus([sentences(30_000, seed=number) for number in range(8)])
    rule, held_out = choose(lengths, 0.02), choose(lengths, 0.02).assign(lengths).held_out
    for number in range(9):
        shards = split_at(lengths, number)
        other = choose_held_out(lambda shards=shards: shards, 0.02)  # type: ignore[misc]
        assert other.hash_limit == rule.hash_limit
        parts = [other.assign(shard).held_out for shard in shards]
        assert (np.concatenate(parts) == held_out).all()


def test_no_training_document_spans_a_gap() -> None:
    """Training documents end where a held-out part begins; other neighbors stay joined."""
    lengths = corpus([sentences(200_000)])
    assignment = choose(lengths, 0.05).assign(lengths)
    borders = np.flatnonzero(np.diff(assignment.held_out))
    runs = np.diff(np.concatenate([[-1], borders, [len(assignment.held_out) - 1]]))
    first = int(assignment.held_out[0])
    assert assignment.train_document_sizes.tolist() == runs[first::2].tolist()


def test_one_training_run_is_not_one_document() -> None:
    """If the held-out parts leave one piece of a single document, that becomes several."""
    seen = 0
    for number in range(300):
        lengths = corpus([[8] * 24], [number << 48])
        rule = choose(lengths, 0.05)
        assignment = rule.assign(lengths)
        seen += not rule.merge_training_parts
        assert len(assignment.train_document_sizes) >= 2
        assert len(assignment.held_out_document_sizes) >= 2
    assert seen


@pytest.mark.parametrize(
    "documents", [[], [[5]], [[5], [6], [7]], [[5, 5, 5]], [[5]] * 9, [[70_000, 3, 90_000]]]
)
def test_nothing_is_held_out_of_too_little(documents: list[list[int]]) -> None:
    """Where two parts cannot be held out and two remain, nothing is held out."""
    lengths = corpus(documents, [sum(document) << 32 for document in documents])
    assert not choose(lengths, 0.01).assign(lengths).held_out.any()


def test_copies_of_everything() -> None:
    """A file that is given many times is cut finer, so that all copies of a part count."""
    copies = 50
    lengths = corpus([sentences(10_000)] * copies, [1 << 40] * copies)
    assert held_out_share(lengths, 0.01) == pytest.approx(0.01, rel=0.2)
