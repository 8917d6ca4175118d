"""Measure the throughput of the example stream, and its start-up time on a billion tokens.

The baseline is a Python loop over sentences and tokens, as in BERT's original code. It runs in the
same process on the same data.

    python benchmarks/data.py [--store STORE] [--tokens 1000000000] [--json FILE]
"""

import argparse
import random
import resource
import tempfile
import time
from itertools import pairwise
from pathlib import Path

import numpy as np
from reporting import report

from bertsmith.data.masking import VocabularyInfo
from bertsmith.data.plan import StorePlan
from bertsmith.data.settings import DataSettings
from bertsmith.data.store import SPLITS, Manifest, Split, Store, write_manifest
from bertsmith.data.stream import ExampleStream
from bertsmith.data.unigram import count_token_ids

#: Target speed of the stream for masked sentence pairs of length 128 in one process.
TARGET_TOKENS_PER_SECOND = 1.5e6
BATCH_SIZE = 256
#: Vocabulary size of the paper.
VOCAB_SIZE = 30522
#: Mean number of tokens in a random sentence.
MEAN_SENTENCE_TOKENS = 25
#: Mean and standard deviation of the logarithm of that number. The mean of the distribution is
#: exp(3 + 0.65 ** 2 / 2) = 25.
LOG_TOKENS_MEAN, LOG_TOKENS_STD = 3.0, 0.65


def make_vocabulary_info() -> VocabularyInfo:
    """Return a vocabulary of the paper's size; a fifth of its tokens continue a word."""
    is_special = np.zeros(VOCAB_SIZE, np.bool_)
    is_special[:5] = True
    is_continuation = np.zeros(VOCAB_SIZE, np.bool_)
    is_continuation[-VOCAB_SIZE // 5 :] = True
    return VocabularyInfo(
        vocab_size=VOCAB_SIZE,
        cls_id=2,
        sep_id=3,
        mask_id=4,
        is_special=is_special,
        is_continuation=is_continuation,
        unk_id=1,
    )


def make_offsets(
    num_tokens: int, mean_document_tokens: float, generator: np.random.Generator
) -> tuple[np.ndarray, ...]:
    """Return the offsets of sentences in tokens, and of documents in sentences.

    Lengths of sentences and documents are random.
    """
    num_sentences = int(num_tokens / MEAN_SENTENCE_TOKENS)
    lengths = generator.lognormal(LOG_TOKENS_MEAN, LOG_TOKENS_STD, num_sentences)
    lengths = np.clip(lengths, 1, 400).astype(np.int64)
    sentence_offsets = np.append(0, np.cumsum(lengths))
    # Twice the expected number of documents is enough to cover all sentences.
    max_documents = int(MEAN_SENTENCE_TOKENS * num_sentences / mean_document_tokens * 2) + 2
    mean_document_sentences = mean_document_tokens / MEAN_SENTENCE_TOKENS
    starts = np.cumsum(1 + generator.exponential(mean_document_sentences, max_documents))
    document_offsets = np.unique(np.append(0, starts[starts < num_sentences]).astype(np.int64))
    return sentence_offsets, np.append(document_offsets, num_sentences)


def make_split(num_tokens: int, *mean_document_tokens: float) -> Split:
    """Return a split of random token ids.

    Each mean document length in ``mean_document_tokens`` has an equal share of the tokens.
    """
    generator = np.random.default_rng(0)
    part_tokens = num_tokens // len(mean_document_tokens)
    parts = [make_offsets(part_tokens, mean, generator) for mean in mean_document_tokens]
    sentence_offsets, document_offsets = parts[0]
    for part_sentences, part_documents in parts[1:]:
        document_offsets = np.append(
            document_offsets, part_documents[1:] + len(sentence_offsets) - 1
        )
        sentence_offsets = np.append(sentence_offsets, part_sentences[1:] + sentence_offsets[-1])
    ids = generator.integers(5, VOCAB_SIZE, int(sentence_offsets[-1])).astype(np.uint16)
    return Split(ids, sentence_offsets, document_offsets, "synthetic")


def measure_stream(
    split: Split, vocabulary: VocabularyInfo, seconds: float = 4.0, **settings_values: object
) -> float:
    """Return the tokens per second of the stream, measured for ``seconds`` or one epoch."""
    settings = DataSettings.model_validate(settings_values)
    stream = ExampleStream(split, vocabulary, settings, settings.max_seqlen, 0, 0)
    num_tokens = 0
    start = time.perf_counter()
    for first in range(0, len(stream) - BATCH_SIZE + 1, BATCH_SIZE):
        num_tokens += len(stream.batch(first, BATCH_SIZE).ids)
        if time.perf_counter() - start > seconds:
            break
    return num_tokens / (time.perf_counter() - start)


def measure_python_loop(split: Split, vocabulary: VocabularyInfo, seconds: float = 4.0) -> float:
    """Return the tokens per second of a Python loop that works like BERT's original code."""
    generator = random.Random(0)
    num_tokens = document_index = 0
    start = time.perf_counter()
    num_documents = len(split.document_offsets) - 1
    max_tokens = 128 - 3  # [CLS] and two [SEP]
    while time.perf_counter() - start < seconds:
        sentences = _read_sentences(split, document_index % num_documents)
        position = 0
        target = generator.randint(2, max_tokens) if generator.random() < 0.1 else max_tokens
        while position < len(sentences):
            size, end = 0, position
            while end < len(sentences) and size < target:
                size += len(sentences[end])
                end += 1
            chunk = sentences[position:end]
            a_end = generator.randint(1, len(chunk) - 1) if len(chunk) > 1 else 1
            segment_a = [token for sentence in chunk[:a_end] for token in sentence]
            if len(chunk) == 1 or generator.random() < 0.5:
                segment_b = _draw_random_segment(
                    split, document_index % num_documents, target - len(segment_a), generator
                )
                position += a_end
            else:
                segment_b = [token for sentence in chunk[a_end:] for token in sentence]
                position = end
            while len(segment_a) + len(segment_b) > max_tokens:
                longer = segment_a if len(segment_a) > len(segment_b) else segment_b
                longer.pop(0 if generator.random() < 0.5 else -1)
            ids = [vocabulary.cls_id, *segment_a, vocabulary.sep_id]
            ids += [*segment_b, vocabulary.sep_id]
            _mask_tokens(ids, vocabulary, generator)
            num_tokens += len(ids)
        document_index += 1
    return num_tokens / (time.perf_counter() - start)


def _read_sentences(split: Split, document: int) -> list[list[int]]:
    """Return the token ids of each sentence of a document."""
    first, last = split.document_offsets[document : document + 2]
    boundaries = split.sentence_offsets[first : last + 1].tolist()
    return [split.ids[start:end].tolist() for start, end in pairwise(boundaries)]


def _draw_random_segment(
    split: Split, excluded_document: int, min_tokens: int, generator: random.Random
) -> list[int]:
    """Return at least ``min_tokens`` tokens from a random sentence of another document on.

    There are fewer tokens if the document ends before.
    """
    document = excluded_document
    while document == excluded_document:
        document = generator.randrange(len(split.document_offsets) - 1)
    ids: list[int] = []
    sentences = _read_sentences(split, document)
    for sentence in sentences[generator.randrange(len(sentences)) :]:
        ids += sentence
        if len(ids) >= min_tokens:
            break
    return ids


def _mask_tokens(
    ids: list[int], vocabulary: VocabularyInfo, generator: random.Random
) -> list[tuple[int, int]]:
    """Mask 15 % of ``ids`` in place; return the positions and original ids of masked tokens."""
    special_ids = {vocabulary.cls_id, vocabulary.sep_id}
    candidates = [position for position, token in enumerate(ids) if token not in special_ids]
    generator.shuffle(candidates)
    masked_positions = sorted(candidates[: max(1, round(0.15 * len(ids)))])
    labels = [(position, ids[position]) for position in masked_positions]
    for position in masked_positions:
        if generator.random() < 0.8:
            ids[position] = vocabulary.mask_id
        elif generator.random() < 0.5:
            ids[position] = generator.randrange(5, vocabulary.vocab_size)
    return labels


def write_sparse_store(path: Path, num_tokens: int) -> None:
    """Write a store of ``num_tokens`` zeros; its files are sparse and need little disk space."""
    generator = np.random.default_rng(0)
    sentence_offsets, document_offsets = make_offsets(num_tokens, 600, generator)
    counts = {}
    for name in SPLITS:
        if name == "heldout":
            # The held-out split is empty.
            sentence_offsets, document_offsets = np.zeros(1, np.int64), np.zeros(1, np.int64)
        sentence_offsets.tofile(path / f"{name}.sentences")
        document_offsets.tofile(path / f"{name}.documents")
        with (path / f"{name}.ids").open("wb") as file:
            file.truncate(2 * int(sentence_offsets[-1]))
        counts[name] = {
            "documents": len(document_offsets) - 1,
            "sentences": len(sentence_offsets) - 1,
            "tokens": int(sentence_offsets[-1]),
        }
    values = {
        "bits": 16,
        "vocab_size": VOCAB_SIZE,
        "lowercase": True,
        "plan": StorePlan(vocabulary_hash=""),
    }
    write_manifest(path, Manifest.model_validate({**values, "splits": counts}))


def measure_startup(num_tokens: int, vocabulary: VocabularyInfo) -> dict[str, float]:
    """Measure the seconds from opening a store to a batch in the middle of an epoch."""
    with tempfile.TemporaryDirectory() as directory:
        write_sparse_store(Path(directory), num_tokens)
        start = time.perf_counter()
        split = Store.open(directory).load_split("train")
        opened = time.perf_counter()
        stream = ExampleStream(split, vocabulary, DataSettings(), 128, 0, 0)
        counted = time.perf_counter()
        stream.batch(len(stream) // 2, BATCH_SIZE)
        finished = time.perf_counter()
    return {
        "big store: tokens": len(split.ids),
        "big store: examples per epoch": len(stream),
        "big store: seconds to open": opened - start,
        "big store: seconds to count an epoch": counted - opened,
        "big store: seconds to a batch in its middle": finished - counted,
    }


def main() -> None:
    """Run all measurements and report them."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--store", type=Path, help="also measure this store of real text")
    parser.add_argument(
        "--tokens",
        type=int,
        default=10**9,
        help="number of tokens in the store that the start-up time is measured with",
    )
    parser.add_argument("--json", type=Path, help="write the results to this file")
    options = parser.parse_args()
    vocabulary = make_vocabulary_info()
    short_documents = make_split(20_000_000, 600)
    long_documents = make_split(20_000_000, 100_000)
    mixed_documents = make_split(20_000_000, 600, 100_000)
    loop_speed = measure_python_loop(short_documents, vocabulary)
    measurements = {
        "Python loop, documents of 600 tokens: tokens/s": loop_speed,
        "documents of 600 tokens: tokens/s": measure_stream(short_documents, vocabulary),
        "documents of 100,000 tokens: tokens/s": measure_stream(long_documents, vocabulary),
        "documents of 600 and 100,000 tokens: tokens/s": measure_stream(
            mixed_documents, vocabulary
        ),
        "without sentence pairs: tokens/s": measure_stream(short_documents, vocabulary, nsp=False),
        "whole words: tokens/s": measure_stream(
            short_documents, vocabulary, whole_word_masking=True
        ),
        "length 512: tokens/s": measure_stream(short_documents, vocabulary, max_seqlen=512),
    }
    ratios = {
        "stream / Python loop": measurements["documents of 600 tokens: tokens/s"] / loop_speed
    }
    if options.store:
        store = Store.open(options.store)
        split = store.load_split("train")
        store_vocabulary = VocabularyInfo.from_tokenizer(store.load_tokenizer())
        measurements["--store: tokens/s"] = measure_stream(split, store_vocabulary)
        ratios["--store: tokens/s / target of 1.5 million"] = (
            measurements["--store: tokens/s"] / TARGET_TOKENS_PER_SECOND
        )
        start = time.perf_counter()
        count_token_ids(split, store.manifest.vocab_size)
        measurements["--store: seconds to count its tokens"] = time.perf_counter() - start
    measurements |= measure_startup(options.tokens, vocabulary)
    max_rss_mb = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
    measurements["peak resident memory, MB, including synthetic splits"] = max_rss_mb
    report("data", ratios, measurements, options.json)


if __name__ == "__main__":
    main()
