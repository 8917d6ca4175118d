"""Generates toy text and toy tasks for scale "smoke", in the file formats of the public datasets.

Results on toy data are meaningless. The data only serve to check that every stage runs.
"""

import json
import random
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

from bertsmith.files import write_atomic
from bertsmith.lab.senses import SENSES
from bertsmith.lab.sources import Sources

#: Number of documents per language.
_NUM_DOCUMENTS = 120
#: Number of rows of a training file. Validation files have a third as many rows.
_NUM_TRAIN_ROWS = 72
_NAMES = ("anna", "peter", "maria", "john", "sara", "paul")
_CITIES = ("london", "paris", "rome", "oslo", "berlin", "madrid")
_ANIMALS = ("cat", "dog", "horse", "bird", "fish", "mouse")
_POSITIVE_ADJECTIVES = ("fine", "lovely", "bright", "happy")
_NEGATIVE_ADJECTIVES = ("awful", "dull", "sad", "broken")
#: The choices for each of the four words of a Korean sentence.
_KOREAN_WORDS = (
    ("고양이가", "개가", "새가", "말이"), ("집에서", "강에서", "산에서", "바다에서"),
    ("물을", "밥을", "고기를", "과일을"), ("먹었다", "보았다", "샀다", "찾았다"),
)  # fmt: skip
#: Empty file that is written last. If it is missing, all files are written again.
_COMPLETE_FILE = "complete"


def fill_missing_sources(sources: Sources, folder: Path) -> Sources:
    """Return the sources with toy files in place of missing files.

    Korean text is not added if the user specified a model, because the vocabulary of the model may
    have no Korean words.

    Args:
        sources: The input files that the user specified.
        folder: The folder of the toy files, written on the first call.
    """
    if not (folder / _COMPLETE_FILE).exists():
        _write_files(folder)
    korean = sources.korean
    if korean is None and not sources.model:
        korean = folder / "korean.jsonl"
    return replace(
        sources,
        english=sources.english or folder / "english.jsonl",
        korean=korean,
        tasks_dir=sources.tasks_dir or folder / "tasks",
    )


def _write_files(folder: Path) -> None:
    """Write the texts and task files. Their bytes are the same every time."""
    rng = random.Random(0)
    write_atomic(
        folder / "english.jsonl", _generate_documents(_generate_english_sentence, "en", rng)
    )
    write_atomic(folder / "korean.jsonl", _generate_documents(_generate_korean_sentence, "ko", rng))
    tasks = folder / "tasks"
    for split, num_rows in (("train", _NUM_TRAIN_ROWS), ("dev", _NUM_TRAIN_ROWS // 3)):
        # The tables are generated when they are written, in this order.
        tables = {
            "SST-2": ("sentence\tlabel", _generate_sst2(num_rows, rng)),
            "MRPC": ("Quality\t#1 String\t#2 String", _generate_mrpc(num_rows, rng)),
            "STS-B": ("index\tsentence1\tsentence2\tscore", _generate_stsb(num_rows, rng)),
        }
        for task, (header, rows) in tables.items():
            write_atomic(tasks / task / f"{split}.tsv", _format_tsv(header, rows))
        write_atomic(tasks / "squad" / f"{split}-v1.1.json", _generate_squad(num_rows, rng))
        name = "train" if split == "train" else "valid"
        write_atomic(tasks / "conll2003" / f"{name}.txt", _generate_conll(num_rows, rng))
    write_atomic(folder / _COMPLETE_FILE, "")


def _generate_documents(
    generate_sentence: Callable[[random.Random], str], language: str, rng: random.Random
) -> str:
    """Return documents in a language as JSON lines."""
    ambiguous_sentences: list[str] = []
    for senses in SENSES[language].values():
        for sentences in senses.values():
            ambiguous_sentences += sentences
    lines = []
    for _ in range(_NUM_DOCUMENTS):
        # Each document has eight generated sentences and two sentences of ``SENSES``.
        generated = [generate_sentence(rng) for _ in range(8)]
        sentences = (*generated, *rng.sample(ambiguous_sentences, 2))
        text = " ".join(f"{sentence}." for sentence in sentences)
        lines.append(json.dumps({"text": text}, ensure_ascii=False))
    return "\n".join(lines) + "\n"


def _generate_english_sentence(rng: random.Random) -> str:
    name, animal = rng.choice(_NAMES), rng.choice(_ANIMALS)
    adjective = rng.choice((*_POSITIVE_ADJECTIVES, *_NEGATIVE_ADJECTIVES))
    return f"{name} saw a {adjective} {animal} in {rng.choice(_CITIES)}"


def _generate_korean_sentence(rng: random.Random) -> str:
    return " ".join(rng.choice(words) for words in _KOREAN_WORDS)


def _format_tsv(header: str, rows: Iterator[tuple[object, ...]]) -> str:
    lines = [header]
    lines += ["\t".join(map(str, row)) for row in rows]
    return "\n".join(lines) + "\n"


def _generate_sst2(num_rows: int, rng: random.Random) -> Iterator[tuple[object, ...]]:
    for number in range(num_rows):
        label = number % 2
        adjective = rng.choice(_POSITIVE_ADJECTIVES if label else _NEGATIVE_ADJECTIVES)
        yield f"the {rng.choice(_ANIMALS)} of {rng.choice(_NAMES)} is {adjective}", label


def _generate_mrpc(num_rows: int, rng: random.Random) -> Iterator[tuple[object, ...]]:
    for number in range(num_rows):
        label = number % 2
        name, other_name = rng.sample(_NAMES, 2)
        # Label 1 means that both sentences have the same meaning.
        second_name = name if label else other_name
        city = rng.choice(_CITIES)
        yield label, f"{name} lives in {city}", f"{city} is where {second_name} lives"


def _generate_stsb(num_rows: int, rng: random.Random) -> Iterator[tuple[object, ...]]:
    for number in range(num_rows):
        words = [rng.choice(_NAMES), rng.choice(_ANIMALS), rng.choice(_CITIES)]
        other_words = [rng.choice(_NAMES), rng.choice(_ANIMALS), rng.choice(_CITIES)]
        num_shared = number % 4
        other_words[:num_shared] = words[:num_shared]
        sentence, other_sentence = (
            f"{name} has a {animal} in {city}" for name, animal, city in (words, other_words)
        )
        # Scores range from 0 to 5. Equal sentences, which share all three words, have 5.
        yield number, sentence, other_sentence, num_shared * 5 / 3


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
