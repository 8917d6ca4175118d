"""The data stream: tokens a second from one process, and the start on a store of a billion tokens.

The peer is the original program's way, a plain loop over sentences and tokens, run in the same
process on the same split. Usage:

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

#: The goal of the project for pairs and masks at length 128, from one process.
GOAL = 1.5e6
BATCH = 256
V = 30522


def made_up_facts() -> VocabularyInfo:
    """Return facts of a vocabulary as large as the paper's; a fifth are pieces of words."""
    special, continuations = np.zeros(V, np.bool_), np.zeros(V, np.bool_)
    special[:5] = True
    continuations[-V // 5 :] = True
    return VocabularyInfo(V, 2, 3, 4, special, continuations, 1)


def offsets(tokens: int, document: float, chance: np.random.Generator) -> tuple[np.ndarray, ...]:
    """Return sentence and document offsets: sentences of about 25 tokens, documents as asked."""
    count = int(tokens / 25)
    sizes = np.clip(chance.lognormal(3.0, 0.65, count), 1, 400).astype(np.int64)
    sentences = np.append(0, np.cumsum(sizes))
    starts = np.cumsum(1 + chance.exponential(document / 25, int(25 * count / document * 2) + 2))
    documents = np.unique(np.append(0, starts[starts < count]).astype(np.int64))
    return sentences, np.append(documents, count)


def made_up_split(tokens: int, *kinds: float) -> Split:
    """Return a split of random ids whose documents have about so many tokens of each kind."""
    chance = np.random.default_rng(0)
    parts = [offsets(tokens // len(kinds), kind, chance) for kind in kinds]
    sentences, documents = parts[0]
    for more, others in parts[1:]:
        documents = np.append(documents, others[1:] + len(sentences) - 1)
        sentences = np.append(sentences, more[1:] + sentences[-1])
    ids = chance.integers(5, V, int(sentences[-1])).astype(np.uint16)
    return Split(ids, sentences, documents, "made up")


def speed(split: Split, facts: VocabularyInfo, seconds: float = 4.0, **choices: object) -> float:
    """Return tokens a second, the start not counted, over some seconds or a whole epoch."""
    settings = DataSettings.model_validate(choices)
    stream = ExampleStream(split, facts, settings, settings.length, 0, 0)
    began, tokens = time.perf_counter(), 0
    for first in range(0, len(stream) - BATCH + 1, BATCH):
        tokens += len(stream.batch(first, BATCH).ids)
        if time.perf_counter() - began > seconds:
            break
    return tokens / (time.perf_counter() - began)


def plain_speed(split: Split, facts: VocabularyInfo, seconds: float = 4.0) -> float:
    """Return tokens a second of a plain loop that does what the original program does."""
    chance = random.Random(0)
    began, tokens, number = time.perf_counter(), 0, 0
    count = len(split.document_offsets) - 1
    room = 128 - 3
    while time.perf_counter() - began < seconds:
        document = _sentences(split, number % count)
        place = 0
        target = chance.randint(2, room) if chance.random() < 0.1 else room
        while place < len(document):
            size, end = 0, place
            while end < len(document) and size < target:
                size += len(document[end])
                end += 1
            chunk = document[place:end]
            cut = chance.randint(1, len(chunk) - 1) if len(chunk) > 1 else 1
            a = [word for sentence in chunk[:cut] for word in sentence]
            if len(chunk) == 1 or chance.random() < 0.5:
                b = _elsewhere(split, number % count, target - len(a), chance)
                place += cut
            else:
                b = [word for sentence in chunk[cut:] for word in sentence]
                place = end
            while len(a) + len(b) > room:
                (a if len(a) > len(b) else b).pop(0 if chance.random() < 0.5 else -1)
            row = [facts.cls_id, *a, facts.sep_id, *b, facts.sep_id]
            _mask(row, facts, chance)
            tokens += len(row)
        number += 1
    return tokens / (time.perf_counter() - began)


def _sentences(split: Split, document: int) -> list[list[int]]:
    first, last = split.document_offsets[document : document + 2]
    bounds = split.sentence_offsets[first : last + 1].tolist()
    return [split.ids[low:high].tolist() for low, high in pairwise(bounds)]


def _elsewhere(split: Split, document: int, wanted: int, chance: random.Random) -> list[int]:
    other = document
    while other == document:
        other = chance.randrange(len(split.document_offsets) - 1)
    found: list[int] = []
    sentences = _sentences(split, other)
    for sentence in sentences[chance.randrange(len(sentences)) :]:
        found += sentence
        if len(found) >= wanted:
            break
    return found


def _mask(row: list[int], facts: VocabularyInfo, chance: random.Random) -> list[tuple[int, int]]:
    special = {facts.cls_id, facts.sep_id}
    places = [place for place, word in enumerate(row) if word not in special]
    chance.shuffle(places)
    chosen = sorted(places[: max(1, round(0.15 * len(row)))])
    labels = [(place, row[place]) for place in chosen]
    for place in chosen:
        if chance.random() < 0.8:
            row[place] = facts.mask_id
        elif chance.random() < 0.5:
            row[place] = chance.randrange(5, facts.vocab_size)
    return labels


def write_big_store(path: Path, tokens: int) -> None:
    """Write a store of so many tokens; its ids are a hole in the file, so it costs little disk."""
    chance = np.random.default_rng(0)
    sentences, documents = offsets(tokens, 600, chance)
    counts = {}
    for name in SPLITS:
        if name == "heldout":
            sentences, documents = np.zeros(1, np.int64), np.zeros(1, np.int64)
        sentences.tofile(path / f"{name}.sentences")
        documents.tofile(path / f"{name}.documents")
        with (path / f"{name}.ids").open("wb") as file:
            file.truncate(2 * int(sentences[-1]))
        counts[name] = {
            "documents": len(documents) - 1,
            "sentences": len(sentences) - 1,
            "tokens": int(sentences[-1]),
        }
    values = {"bits": 16, "vocab_size": V, "lowercase": True, "plan": StorePlan(vocabulary_hash="")}
    write_manifest(path, Manifest.model_validate({**values, "splits": counts}))


def start_up(tokens: int, facts: VocabularyInfo) -> dict[str, float]:
    """Measure the way from nothing to the first batch on a big store."""
    with tempfile.TemporaryDirectory() as folder:
        write_big_store(Path(folder), tokens)
        began = time.perf_counter()
        split = Store.open(folder).load_split("train")
        opened = time.perf_counter()
        stream = ExampleStream(split, facts, DataSettings(), 128, 0, 0)
        counted = time.perf_counter()
        stream.batch(len(stream) // 2, BATCH)
        ready = time.perf_counter()
    return {
        "big store: tokens": len(split.ids),
        "big store: examples an epoch": len(stream),
        "big store: seconds to open": opened - began,
        "big store: seconds to count an epoch": counted - opened,
        "big store: seconds to a batch in its middle": ready - counted,
    }


def main() -> None:
    """Measure and report."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--store", type=Path, help="a store of real text to measure on as well")
    parser.add_argument("--tokens", type=int, default=10**9, help="tokens of the big store")
    parser.add_argument("--json", type=Path, help="write the results here")
    given = parser.parse_args()
    facts = made_up_facts()
    articles, books = made_up_split(20_000_000, 600), made_up_split(20_000_000, 100_000)
    mixture = made_up_split(20_000_000, 600, 100_000)
    plain = plain_speed(articles, facts)
    figures = {
        "plain loop, documents of 600 tokens: tokens/s": plain,
        "documents of 600 tokens: tokens/s": speed(articles, facts),
        "documents of 100,000 tokens: tokens/s": speed(books, facts),
        "both mixed: tokens/s": speed(mixture, facts),
        "without pairs: tokens/s": speed(articles, facts, nsp=False),
        "whole words: tokens/s": speed(articles, facts, whole_words=True),
        "length 512: tokens/s": speed(articles, facts, length=512),
    }
    ratios = {"stream / plain loop": figures["documents of 600 tokens: tokens/s"] / plain}
    if given.store:
        store = Store.open(given.store)
        real, own = store.load_split("train"), VocabularyInfo.from_tokenizer(store.load_tokenizer())
        figures["the store given: tokens/s"] = speed(real, own)
        ratios["stream / goal of 1.5 M tokens/s, the store given"] = (
            figures["the store given: tokens/s"] / GOAL
        )
        began = time.perf_counter()
        count_token_ids(real, store.manifest.vocab_size)
        figures["the store given: seconds to count its words"] = time.perf_counter() - began
    figures |= start_up(given.tokens, facts)
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
    figures["peak resident memory, MB, made-up splits included"] = peak
    report("data", ratios, figures, given.json)


if __name__ == "__main__":
    main()
