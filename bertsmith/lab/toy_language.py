"""A toy language, with tasks in the public ones' forms: what "smoke" reads if nothing is given.

It never trains. What is found in it says nothing of real text: it shows that every stage runs.
"""

import json
import random
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

from bertsmith.files import write_atomic
from bertsmith.lab.senses import SENSES
from bertsmith.lab.sources import Sources

#: How many documents, and rows of a training file; held-out files have a third as many.
_DOCUMENTS, _ROWS = 120, 72
_NAMES = ("anna", "peter", "maria", "john", "sara", "paul")
_PLACES = ("london", "paris", "rome", "oslo", "berlin", "madrid")
_ANIMALS = ("cat", "dog", "horse", "bird", "fish", "mouse")
_GOOD, _BAD = ("fine", "lovely", "bright", "happy"), ("awful", "dull", "sad", "broken")
_KOREAN = (
    ("고양이가", "개가", "새가", "말이"), ("집에서", "강에서", "산에서", "바다에서"),
    ("물을", "밥을", "고기를", "과일을"), ("먹었다", "보았다", "샀다", "찾았다"),
)  # fmt: skip


def fill_missing_sources(given: Sources, folder: Path) -> Sources:
    """Return the sources with a toy for each that is not given, written into ``folder``.

    Its Korean is asked of models alone that were made of it.
    """
    if not (folder / "whole").exists():
        _write(folder)
    return replace(
        given,
        english=given.english or folder / "english.jsonl",
        korean=given.korean or (None if given.model else folder / "korean.jsonl"),
        tasks_dir=given.tasks_dir or folder / "tasks",
    )


def _write(folder: Path) -> None:
    chance = random.Random(0)
    write_atomic(folder / "english.jsonl", _documents(_english, "en", chance))
    write_atomic(folder / "korean.jsonl", _documents(_korean, "ko", chance))
    tasks = folder / "tasks"
    for part, rows in (("train", _ROWS), ("dev", _ROWS // 3)):
        write_atomic(tasks / "SST-2" / f"{part}.tsv", _sentiment(rows, chance))
        write_atomic(tasks / "MRPC" / f"{part}.tsv", _pairs(rows, chance))
        write_atomic(tasks / "STS-B" / f"{part}.tsv", _scores(rows, chance))
        write_atomic(tasks / "squad" / f"{part}-v1.1.json", _questions(rows, chance))
        name = "train" if part == "train" else "valid"
        write_atomic(tasks / "conll2003" / f"{name}.txt", _entities(rows, chance))
    # Last of all: a kill before it has everything written anew.
    write_atomic(folder / "whole", "")


def _documents(sentence: object, language: str, chance: random.Random) -> str:
    """Return documents as JSON lines: the toy's sentences, and those of words of two senses."""
    assert callable(sentence)
    known = [text for word in SENSES[language].values() for own in word.values() for text in own]
    lines = []
    for _ in range(_DOCUMENTS):
        own = [sentence(chance) for _ in range(8)] + chance.sample(known, 2)
        lines.append(json.dumps({"text": " ".join(f"{one}." for one in own)}, ensure_ascii=False))
    return "\n".join(lines) + "\n"


def _english(chance: random.Random) -> str:
    who, animal = chance.choice(_NAMES), chance.choice(_ANIMALS)
    mood = chance.choice((*_GOOD, *_BAD))
    return f"{who} saw a {mood} {animal} in {chance.choice(_PLACES)}"


def _korean(chance: random.Random) -> str:
    return " ".join(chance.choice(words) for words in _KOREAN)


def _table(header: str, rows: Iterator[tuple[object, ...]]) -> str:
    return header + "\n" + "".join("\t".join(map(str, row)) + "\n" for row in rows)


def _sentiment(count: int, chance: random.Random) -> str:
    def rows() -> Iterator[tuple[object, ...]]:
        for number in range(count):
            mood = chance.choice(_GOOD if number % 2 else _BAD)
            yield f"the {chance.choice(_ANIMALS)} of {chance.choice(_NAMES)} is {mood}", number % 2

    return _table("sentence\tlabel", rows())


def _pairs(count: int, chance: random.Random) -> str:
    def rows() -> Iterator[tuple[object, ...]]:
        for number in range(count):
            who, other = chance.sample(_NAMES, 2)
            told = who if number % 2 else other
            place = chance.choice(_PLACES)
            yield number % 2, f"{who} lives in {place}", f"{place} is where {told} lives"

    return _table("Quality\t#1 String\t#2 String", rows())


def _scores(count: int, chance: random.Random) -> str:
    def rows() -> Iterator[tuple[object, ...]]:
        for number in range(count):
            words = [chance.choice(_NAMES), chance.choice(_ANIMALS), chance.choice(_PLACES)]
            kept = number % 4
            others = [chance.choice(_NAMES), chance.choice(_ANIMALS), chance.choice(_PLACES)]
            second = [*words[:kept], *others[kept:]]
            yield (
                number,
                *("{} has a {} in {}".format(*own) for own in (words, second)),
                kept * 5 / 3,
            )

    return _table("index\tsentence1\tsentence2\tscore", rows())


def _questions(count: int, chance: random.Random) -> str:
    articles = []
    for number in range(count):
        who, place = chance.choice(_NAMES), chance.choice(_PLACES)
        context = f"{who} lives in {place} with a {chance.choice(_ANIMALS)}."
        answer = {"text": place, "answer_start": context.index(place)}
        question = {"id": str(number), "question": f"where does {who} live?", "answers": [answer]}
        articles.append({"title": who, "paragraphs": [{"context": context, "qas": [question]}]})
    return json.dumps({"version": "1.1", "data": articles})


def _entities(count: int, chance: random.Random) -> str:
    lines = ["-DOCSTART- -X- -X- O", ""]
    for _ in range(count):
        who, place = chance.choice(_NAMES), chance.choice(_PLACES)
        words = ((who, "I-PER"), ("lives", "O"), ("in", "O"), (place, "I-LOC"), (".", "O"))
        lines += [f"{word} X X {tag}" for word, tag in words] + [""]
    return "\n".join(lines) + "\n"
