"""What an experiment reads from outside: text, labelled tasks, a model; each named in one place.

It never knows what an experiment does with them.
"""

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from bertsmith.errors import TaskError
from bertsmith.files import write_atomic
from bertsmith.tasks.public import PUBLIC_TASKS
from bertsmith.text.archives import COMPRESSION_SUFFIXES
from bertsmith.text.sources import find_sources, kind_from_name

#: Where the files of a task may lie in the folder of all tasks, the usual names first.
_FOLDERS: dict[str, tuple[str, ...]] = {
    "sst-2": ("SST-2", "glue/SST-2"),
    "sts-b": ("STS-B", "glue/STS-B"),
    "mrpc": ("MRPC", "glue/MRPC"),
    "squad": ("squad", "SQuAD"),
    "conll2003": ("conll2003",),
}
#: Bytes of a text by which its characters are reckoned.
_BEGINNING = 2**18


@dataclass(frozen=True)
class Sources:
    """Text by language, the folder of labelled tasks, a model directory; None: not given."""

    english: Path | None = None
    korean: Path | None = None
    tasks_dir: Path | None = None
    model: str | None = None

    def text_path(self, language: str) -> Path:
        """Return the text of a language, "en" or "ko". TaskError if there is none."""
        found = self.english if language == "en" else self.korean
        option = "--text" if language == "en" else "--korean-text"
        if found is None:
            raise TaskError(
                f"this experiment reads text: give it with {option} FILE_OR_FOLDER "
                "(at --scale smoke a toy stands in)"
            )
        if not found.exists():
            raise TaskError(f"{option} {found}: there is nothing there")
        if found.is_file() and not found.stat().st_size:
            raise TaskError(f"{option} {found}: this file is empty")
        return found

    def text_files(self, language: str) -> dict[str, Path]:
        """Return the files that a language's text is read from, each by the part that it plays.

        A part tells how its file is read where the file's own name decides that. Raises TaskError,
        and CorpusError where there is no text.
        """
        place = self.text_path(language)
        files = [Path(one.name) for one in find_sources([str(place)])]
        if len(files) > 1:
            return {f"text {file.relative_to(place)}": file for file in files}
        kind = kind_from_name(files[0])
        return {"text" if kind == "jsonl" else f"text, {kind}": files[0]}

    def check_paths(self, languages: Sequence[str], *written: Path) -> None:
        """Raise TaskError for text that is not there, or for a folder around what is written.

        languages: those that are read; of a model that was given none is. written: folders whose
        files would else be read as text, or be a part of the model, the next time.
        """
        around = [("--model", Path(self.model))] if self.model else []
        for language, option, place in (("en", "--text", self.english),
                                        ("ko", "--korean-text", self.korean)):  # fmt: skip
            if place is not None:
                self.text_path(language)
                if language in languages and not self.model:
                    around.append((option, place))
        for option, place in around:
            for folder in written:
                if _holds(place, folder):
                    raise TaskError(
                        f"{option} {place}: {folder}, which the lab writes, lies in it and would "
                        "be a part of it the next time; give another --out or another folder"
                    )

    def task_dir(self, name: str) -> Path:
        """Return the folder of a public task. TaskError, naming where it was looked for."""
        if self.tasks_dir is None:
            raise TaskError(
                f"this experiment fine-tunes on {name}: give the folder of the labelled tasks with "
                f"--tasks FOLDER (in it {_FOLDERS[name][0]}, as the task's makers lay it out)"
            )
        for folder in _FOLDERS[name]:
            if (self.tasks_dir / folder).is_dir():
                return self.tasks_dir / folder
        raise TaskError(
            f"--tasks {self.tasks_dir}: no folder {' or '.join(_FOLDERS[name])} there for {name}"
        )

    def task_files(self, name: str) -> tuple[Path, Path]:
        """Return the training file of a public task, and the held-out file that decides."""
        folder, public = self.task_dir(name), PUBLIC_TASKS[name]
        train = folder / public.train_file
        if not train.exists():
            # Parts of it are handed on under names that begin with its own.
            stem, suffix = train.stem, train.suffix
            train = next(iter(sorted(folder.glob(f"{stem}*{suffix}"))), train)
        held = folder / next(iter(public.dev_files.values()))
        for file in (train, held):
            if not file.exists():
                raise TaskError(f"{file}: not there; {name} needs it")
        return train, held


def estimate_characters(file: Path) -> int:
    """Return the characters of a file, about: as many a byte as at its beginning.

    Those of a packed one, or of Parquet, count as its bytes.
    """
    size = file.stat().st_size
    if is_compressed(file):
        return size
    with file.open("rb") as content:
        begins = content.read(_BEGINNING)
    return round(size * len(begins.decode("utf-8", "ignore")) / max(len(begins), 1))


def is_compressed(file: Path) -> bool:
    """Tell whether a file's size says little about its characters."""
    return kind_from_name(file) == "parquet" or file.suffix in COMPRESSION_SUFFIXES


def _holds(place: Path, folder: Path) -> bool:
    """Tell whether a folder is read with the one around it: hidden ones are passed over."""
    if not place.is_dir() or not folder.resolve().is_relative_to(place.resolve()):
        return False
    parts = folder.resolve().relative_to(place.resolve()).parts
    return not any(part.startswith(".") for part in parts)


def read_squad(path: Path) -> dict[str, Any]:
    """Return what a file in SQuAD's form holds, its articles under "data". Raises TaskError."""
    try:
        content: dict[str, Any] = dict(json.loads(path.read_text(encoding="utf-8")))
        for article in content["data"]:
            for paragraph in article["paragraphs"]:
                asked = [paragraph["context"], *(one["question"] for one in paragraph["qas"])]
                "".join(asked)
    except (ValueError, LookupError, TypeError):
        raise TaskError(
            f"{path}: this is no file in SQuAD's form (JSON; under data articles with paragraphs, "
            "a context and questions under qas in each)"
        ) from None
    return content


def subsample_squad(path: Path, every: int, out: Path) -> Path:
    """Write every so many-th article of a file in SQuAD's form, and return where."""
    content = read_squad(path)
    content["data"] = content["data"][::every]
    write_atomic(out, json.dumps(content, ensure_ascii=False))
    return out
