"""Inputs of the experiments: text, labeled tasks and a model."""

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

#: Possible folders of each task inside the folder of all tasks, in order of preference.
_TASK_FOLDERS: dict[str, tuple[str, ...]] = {
    "sst-2": ("SST-2", "glue/SST-2"),
    "sts-b": ("STS-B", "glue/STS-B"),
    "mrpc": ("MRPC", "glue/MRPC"),
    "squad": ("squad", "SQuAD"),
    "conll2003": ("conll2003",),
}
#: Bytes at the start of a text from which its number of characters is estimated.
_SAMPLE_BYTES = 2**18


@dataclass(frozen=True)
class Sources:
    """The input files of experiments, None where the user gave none.

    Attributes:
        english: English text, a file or a folder.
        korean: Korean text, a file or a folder.
        tasks_dir: The folder of labeled tasks.
        model: A model directory.
    """

    english: Path | None = None
    korean: Path | None = None
    tasks_dir: Path | None = None
    model: str | None = None

    def get_text_path(self, language: str) -> Path:
        """Return the text of a language, "en" or "ko".

        Raises:
            TaskError: The text was not given, does not exist or is empty.
        """
        path = self.english if language == "en" else self.korean
        option = "--text" if language == "en" else "--korean-text"
        if path is None:
            raise TaskError(
                f"this experiment needs text: pass {option} FILE_OR_FOLDER "
                "(--scale smoke works without text)"
            )
        if not path.exists():
            raise TaskError(f"{option} {path}: no such file or folder")
        if path.is_file() and not path.stat().st_size:
            raise TaskError(f"{option} {path}: this file is empty")
        return path

    def find_text_files(self, language: str) -> dict[str, Path]:
        """Return the text files of a language by their role in the stage that reads them.

        The role names the file format where it depends on the file name, because stages hash roles
        and contents, not file names.

        Raises:
            TaskError: The text was not given, does not exist or is empty.
            CorpusError: The folder has no text files.
        """
        path = self.get_text_path(language)
        files = [Path(source.name) for source in find_sources([str(path)])]
        if len(files) > 1:
            return {f"text {file.relative_to(path)}": file for file in files}
        kind = kind_from_name(files[0])
        return {"text" if kind == "jsonl" else f"text, {kind}": files[0]}

    def check_paths(self, languages: Sequence[str], *output_dirs: Path) -> None:
        """Check that texts exist and that no output folder is inside an input folder.

        Output files inside an input folder would be read as text, or hashed as a part of the model,
        by the next run.

        Args:
            languages: The languages that the experiment reads; none are read if a model is given.
            output_dirs: The folders that the experiment writes to.

        Raises:
            TaskError: A text is missing or empty, or an input folder contains an output folder.
        """
        inputs = [("--model", Path(self.model))] if self.model else []
        for language, option, path in (("en", "--text", self.english),
                                       ("ko", "--korean-text", self.korean)):  # fmt: skip
            if path is not None:
                self.get_text_path(language)
                if language in languages and not self.model:
                    inputs.append((option, path))
        for option, path in inputs:
            for folder in output_dirs:
                if _includes_folder(path, folder):
                    raise TaskError(
                        f"{option} {path}: this folder contains the output folder {folder}, which "
                        "the next run would read as input; choose another --out or another folder"
                    )

    def find_task_dir(self, name: str) -> Path:
        """Return the folder of a public task.

        Raises:
            TaskError: No folder of tasks was given, or this task is not in it.
        """
        folders = _TASK_FOLDERS[name]
        if self.tasks_dir is None:
            raise TaskError(
                f"this experiment fine-tunes on {name}: pass --tasks FOLDER, a folder with the "
                f"public task files (it needs {folders[0]}, with the original file names)"
            )
        for folder in folders:
            if (self.tasks_dir / folder).is_dir():
                return self.tasks_dir / folder
        raise TaskError(f"--tasks {self.tasks_dir}: no folder {' or '.join(folders)} for {name}")

    def find_task_files(self, name: str) -> tuple[Path, Path]:
        """Return the training file and the validation file of a public task.

        Raises:
            TaskError: A file is missing.
        """
        folder, public = self.find_task_dir(name), PUBLIC_TASKS[name]
        train = folder / public.train_file
        if not train.exists():
            # A file whose name continues the original name is a part of the training set.
            stem, suffix = train.stem, train.suffix
            train = next(iter(sorted(folder.glob(f"{stem}*{suffix}"))), train)
        dev = folder / next(iter(public.dev_files.values()))
        for file in (train, dev):
            if not file.exists():
                raise TaskError(f"{file}: no such file, but {name} needs it")
        return train, dev


def estimate_characters(file: Path) -> int:
    """Estimate the number of characters of a text file from the bytes at its start.

    Compressed and Parquet files count one character per byte.
    """
    size = file.stat().st_size
    if is_compressed(file):
        return size
    with file.open("rb") as content:
        sample = content.read(_SAMPLE_BYTES)
    return round(size * len(sample.decode("utf-8", "ignore")) / max(len(sample), 1))


def is_compressed(file: Path) -> bool:
    """Return whether a file is compressed or Parquet, so that its size is not that of its text."""
    return kind_from_name(file) == "parquet" or file.suffix in COMPRESSION_SUFFIXES


def _includes_folder(path: Path, folder: Path) -> bool:
    """Return whether reading ``path`` includes ``folder``; hidden folders are not read."""
    if not path.is_dir() or not folder.resolve().is_relative_to(path.resolve()):
        return False
    parts = folder.resolve().relative_to(path.resolve()).parts
    return not any(part.startswith(".") for part in parts)


def read_squad(path: Path) -> dict[str, Any]:
    """Return the content of a SQuAD file, with its articles under "data".

    Raises:
        TaskError: The file does not have the SQuAD format.
    """
    try:
        content: dict[str, Any] = dict(json.loads(path.read_text(encoding="utf-8")))
        for article in content["data"]:
            for paragraph in article["paragraphs"]:
                questions = (question["question"] for question in paragraph["qas"])
                # join raises TypeError for values that are not strings.
                "".join([paragraph["context"], *questions])
    except (ValueError, LookupError, TypeError):
        raise TaskError(
            f"{path}: not in the SQuAD format (JSON with a list of articles under data; articles "
            "have paragraphs, and paragraphs have a context and questions under qas)"
        ) from None
    return content


def subsample_squad(path: Path, article_step: int, out: Path) -> Path:
    """Write every n-th article of a SQuAD file to ``out``, and return ``out``."""
    content = read_squad(path)
    content["data"] = content["data"][::article_step]
    write_atomic(out, json.dumps(content, ensure_ascii=False))
    return out
