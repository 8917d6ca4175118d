"""What an experiment reads from outside: text, labelled tasks, a model; each named in one place.

It never knows what an experiment does with them.
"""

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from bertsmith.errors import TaskError
from bertsmith.files import write_whole
from bertsmith.tasks.public import TASKS

#: Where the files of a task may lie in the folder of all tasks, the usual names first.
_FOLDERS: dict[str, tuple[str, ...]] = {
    "sst-2": ("SST-2", "glue/SST-2"),
    "sts-b": ("STS-B", "glue/STS-B"),
    "mrpc": ("MRPC", "glue/MRPC"),
    "squad": ("squad", "SQuAD"),
    "conll2003": ("conll2003",),
}


@dataclass(frozen=True)
class Sources:
    """Text by language, the folder of labelled tasks, a model directory; None: not given."""

    english: Path | None = None
    korean: Path | None = None
    tasks: Path | None = None
    model: str | None = None

    def text(self, language: str) -> Path:
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

    def task(self, name: str) -> Path:
        """Return the folder of a public task. TaskError, naming where it was looked for."""
        if self.tasks is None:
            raise TaskError(
                f"this experiment fine-tunes on {name}: give the folder of the labelled tasks with "
                f"--tasks FOLDER (in it {_FOLDERS[name][0]}, as the task's makers lay it out)"
            )
        for folder in _FOLDERS[name]:
            if (self.tasks / folder).is_dir():
                return self.tasks / folder
        raise TaskError(
            f"--tasks {self.tasks}: no folder {' or '.join(_FOLDERS[name])} there for {name}"
        )

    def files(self, name: str) -> tuple[Path, Path]:
        """Return the training file of a public task, and the held-out file that decides."""
        folder, public = self.task(name), TASKS[name]
        train = folder / public.train
        if not train.exists():
            # Parts of it are handed on under names that begin with its own.
            stem, suffix = train.stem, train.suffix
            train = next(iter(sorted(folder.glob(f"{stem}*{suffix}"))), train)
        held = folder / next(iter(public.dev.values()))
        for file in (train, held):
            if not file.exists():
                raise TaskError(f"{file}: not there; {name} needs it")
        return train, held


def cut_squad(path: Path, every: int, out: Path) -> Path:
    """Write every so many-th article of a file in SQuAD's form, and return where."""
    data = json.loads(path.read_text(encoding="utf-8"))
    content: dict[str, Any] = {**data, "data": data["data"][::every]}
    write_whole(out, json.dumps(content, ensure_ascii=False))
    return out
