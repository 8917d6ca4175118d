"""Generates toy text and toy tasks for scale "smoke", in the formats of the public files.

Results on them mean nothing; they only show that every stage runs.
"""

import json
import random
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

from bertsmith.files import write_atomic
from bertsmith.lab.senses import SENSES
from bertsmith.lab.sources import Sources

#: Documents per language, and rows of a training file; validation files have a third as many.
_NUM_DOCUMENTS, _NUM_TRAIN_ROWS = 120, 72
_NAMES = ("anna", "peter", "maria", "john", "sara", "paul")
_CITIES = ("london", "paris", "rome", "oslo", "berlin", "madrid")
_ANIMALS = ("cat", "dog", "horse", "bird", "fish", "mouse")
_POSITIVE, _NEGATIVE = ("fine", "lovely", "bright", "happy"), ("awful", "dull", "sad", "broken")
#: Choices for each word of a Korean sentence.
_KOREAN_WORDS = (
    ("고양이가", "개가", "새가", "말이"), ("집에서", "강에서", "산에서", "바다에서"),
    ("물을", "밥을", "고기를", "과일을"), ("먹었다", "보았다", "샀다", "찾았다"),
)  # fmt: skip
#: Written last, so that an interrupted process writes all files again.
_COMPLETE_FILE = "whole"


def fill_missing_sources(sources: Sources, folder: Path) -> Sources:
    """Return the sources with toy files, written to ``folder``, for everything that is missing.

    A user's model gets no toy Korean text, which it cannot know.
    """
    if not (folder / _COMPLETE_FILE).exists():
        _write_files(folder)
    return replace(
        sources,
        english=sources.english or folder / "english.jsonl",
        korean=sources.korean or (None if sources.model else folder / "korean.jsonl"),
        tasks_dir=sources.tasks_dir or folder / "tasks",
    )


def _write_files(folder: Path) -> None:
    rng = random.Random(0)
    write_atomic(
        folder / "english.jsonl", _generate_documents(_generate_english_sentence, "en", rng)
    )
    write_atomic(folder / "korean.jsonl", _generate_documents(_generate_korean_sentence, "ko", rng))
    tasks = folder / "tasks"
    for split, num_rows in (("train", _NUM_TRAIN_ROWS), ("dev", _NUM_TRAIN_ROWS // 3)):
        write_atomic(tasks / "SST-2" / f"{split}.tsv", _generate_sst2(num_rows, rng))
        write_atomic(tasks / "MRPC" / f"{split}.tsv", _generate_mrpc(num_rows, rng))
        write_atomic(tasks / "STS-B" / f"{split}.tsv", _generate_stsb(num_rows, rng))
        write_atomic(tasks / "squad" / f"{split}-v1.1.json", _generate_squad(num_rows, rng))
        name = "train" if split == "train" else "valid"
        write_atomic(tasks / "conll2003" / f"{name}.txt", _generate_conll(num_rows, rng))
    write_atomic(folder / _COMPLETE_FILE, "")


def _generate_documents(
    make_sentence: Callable[[random.Random], str], language: str, rng: random.Random
) -> str:
    """Return documents as JSON lines, of generated sentences and sentences from ``SENSES``."""
    sense_texts = [text for senses in SENSES[language].values()
                   for texts in senses.values() for text in texts]  # fmt: skip
    lines = []
    for _ in range(_NUM_DOCUMENTS):
        sentences = [make_sentence(rng) for _ in range(8)] + rng.sample(sense_texts, 2)
        text = " ".join(f"{sentence}." for sentence in sentences)
        lines.append(json.dumps({"text": text}, ensure_ascii=False))
    return "\n".join(lines) + "\n"


def _generate_english_sentence(rng: random.Random) -> str:
    name, animal = rng.choice(_NAMES), rng.choice(_ANIMALS)
    adjective = rng.choice((*_POSITIVE, *_NEGATIVE))
    return f"{name} saw a {adjective} {animal} in {rng.choice(_CITIES)}"


def _generate_korean_sentence(rng: random.Random) -> str:
    return " ".join(rng.choice(words) for words in _KOREAN_WORDS)


def _format_tsv(header: str, rows: Iterator[tuple[object, ...]]) -> str:
    return header + "\n" + "".join("\t".join(map(str, row)) + "\n" for row in rows)


def _generate_sst2(num_rows: int, rng: random.Random) -> str:
    def rows() -> Iterator[tuple[object, ...]]:
        for number in range(num_rows):
            label = number % 2
            adjective = rng.choice(_POSITIVE if label else _NEGATIVE)
            yield f"the {rng.choice(_ANIMALS)} of {rng.choice(_NAMES)} is {adjective}", label

    return _format_tsv("sentence\tlabel", rows())


def _generate_mrpc(num_rows: int, rng: random.Random) -> str:
    def rows() -> Iterator[tuple[object, ...]]:
        for number in range(num_rows):
            label = number % 2
            name, other_name = rng.sample(_NAMES, 2)
            second_name = name if label else other_name
            city = rng.choice(_CITIES)
            yield label, f"{name} lives in {city}", f"{city} is where {second_name} lives"

    return _format_tsv("Quality\t#1 String\t#2 String", rows())


def _generate_stsb(num_rows: int, rng: random.Random) -> str:
    def rows() -> Iterator[tuple[object, ...]]:
        for number in range(num_rows):
            words = [rng.choice(_NAMES), rng.choice(_ANIMALS), rng.choice(_CITIES)]
            num_shared = number % 4
            others = [rng.choice(_NAMES), rng.choice(_ANIMALS), rng.choice(_CITIES)]
            second = [*words[:num_shared], *others[num_shared:]]
            texts = ("{} has a {} in {}".format(*triple) for triple in (words, second))
            yield number, *texts, num_shared * 5 / 3

    return _format_tsv("index\tsentence1\tsentence2\tscore", rows())


def _generate_squad(num_questions: int, rng: random.Random) -> str:
    articles = []
    for number in range(num_questions):
        name, city = rng.choice(_NAMES), rng.choice(_CITIES)
        context = f"{name} lives in {city} with a {rng.choice(_ANIMALS)}."
        answer = {"text": city, "answer_start": context.index(city)}
        question = {"id": str(number), "question": f"where does {name} live?", "answers": [answer]}
        articles.append({"title": name, "paragraphs": [{"context": context, "qas": [question]}]})
    return json.dumps({"version": "1.1", "data": articles})


def _generate_conll(num_sentences: int, rng: random.Random) -> str:
    lines = ["-DOCSTART- -X- -X- O", ""]
    for _ in range(num_sentences):
        name, city = rng.choice(_NAMES), rng.choice(_CITIES)
        tokens = ((name, "I-PER"), ("lives", "O"), ("in", "O"), (city, "I-LOC"), (".", "O"))
        lines += [f"{token} X X {tag}" for token, tag in tokens] + [""]
    return "\n".join(lines) + "\n"
