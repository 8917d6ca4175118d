"""Input files of the experiments: texts, labeled tasks and a model."""

import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from bertsmith.errors import TaskError
from bertsmith.files import describe_missing_path, write_atomic
from bertsmith.tasks.public import PUBLIC_TASK_FOLDERS, PUBLIC_TASKS, find_task_folder
from bertsmith.text.archives import COMPRESSION_SUFFIXES
from bertsmith.text.sources import detect_kind_from_name, find_sources

#: Number of bytes at the start of a text from which its number of characters is estimated.
_SAMPLE_BYTES = 2**18


@dataclass(frozen=True)
class Sources:
    """The input files of experiments. A field is None if the user did not specify it.

    Attributes:
        english: A file or a folder with English text.
        korean: A file or a folder with Korean text.
        tasks_dir: A folder with one subfolder for each labeled task.
        model: A model directory.
    """

    english: Path | None = None
    korean: Path | None = None
    tasks_dir: Path | None = None
    model: str | None = None

    def get_text_path(self, language: str) -> Path:
        """Return the text file or folder of a language, "en" or "ko".

        Raises:
            TaskError: No text was specified, or it does not exist or is empty.
        """
        path = self.english if language == "en" else self.korean
        option = "--text" if language == "en" else "--korean-text"
        if path is None:
            raise TaskError(
                f"this experiment needs text, but {option} is missing; pass {option} "
                "FILE_OR_FOLDER (--scale smoke works without text)"
            )
        if not path.exists():
            raise TaskError(f"{option} {describe_missing_path(path, 'file or folder')}")
        if path.is_file() and not path.stat().st_size:
            raise TaskError(f"{option} {path}: this file is empty; choose a file with text")
        return path

    def find_text_files(self, language: str) -> dict[str, Path]:
        """Return the text files of a language by their role in the stage that reads them.

        Stages hash roles and contents, but not file names. The role of a single file therefore
        contains the file format, which depends on the file name.

        Raises:
            TaskError: No text was specified, or it does not exist or is empty.
            CorpusError: The folder has no text files.
        """
        path = self.get_text_path(language)
        files = [Path(source.name) for source in find_sources([str(path)])]
        if len(files) > 1:
            return {f"text {file.relative_to(path)}": file for file in files}
        file_format = detect_kind_from_name(files[0])
        return {"text" if file_format == "jsonl" else f"text, {file_format}": files[0]}

    def check_paths(self, languages: Sequence[str], *output_dirs: Path) -> None:
        """Check that texts exist and that no output folder is inside an input folder.

        The next run would read output files in a text folder as text. It would hash output files in
        a model directory as a part of the model.

        Args:
            languages: The languages whose texts the experiment reads if there is no model.
            output_dirs: The folders that the experiment writes to.

        Raises:
            TaskError: A text is missing or empty, or an input folder contains an output folder.
        """
        inputs = [("--model", Path(self.model))] if self.model else []
        for language, option, path in (
            ("en", "--text", self.english),
            ("ko", "--korean-text", self.korean),
        ):
            if path is not None:
                # Raises an error if the text is missing or empty.
                self.get_text_path(language)
                if language in languages and not self.model:
                    inputs.append((option, path))
        for option, path in inputs:
            for folder in output_dirs:
                if _reads_folder(path, folder):
                    raise TaskError(
                        f"{option} {path}: this folder contains the output folder {folder}, which "
                        "the next run would read as input; choose another --out or another folder"
                    )

    def find_task_dir(self, name: str) -> Path:
        """Return the folder of a public task.

        Raises:
            TaskError: No tasks folder was specified, or it has no folder of this task.
        """
        folders = PUBLIC_TASK_FOLDERS[name]
        if self.tasks_dir is None:
            raise TaskError(
                f"this experiment fine-tunes on {name}, but --tasks is missing; pass --tasks "
                f"FOLDER, where FOLDER/{folders[0]} has the public files of {name} with their "
                "original names"
            )
        folder = find_task_folder(self.tasks_dir, name)
        if folder is None:
            raise TaskError(
                f"--tasks {self.tasks_dir}: no folder {' or '.join(folders)} for {name}; add it or "
                "choose another --tasks"
            )
        return folder

    def find_task_files(self, name: str) -> tuple[Path, Path]:
        """Return the training file and the validation file of a public task.

        Raises:
            TaskError: A file is missing.
        """
        folder = self.find_task_dir(name)
        task = PUBLIC_TASKS[name]
        train = folder / task.train_file
        if not train.exists():
            # A file with a longer name, such as train-v1.1-subset.json, has a part of the training
            # set.
            subset_files = sorted(folder.glob(f"{train.stem}*{train.suffix}"))
            if subset_files:
                train = subset_files[0]
        first_dev_file, *_ = task.dev_files.values()
        dev = folder / first_dev_file
        for file in (train, dev):
            if not file.exists():
                raise TaskError(f"{file}: no such file; add this public file of {name}")
        return train, dev


def estimate_characters(file: Path) -> int:
    """Estimate the number of characters of a text file from the bytes at its start.

    For compressed and Parquet files, the estimate is one character per byte.
    """
    size = file.stat().st_size
    if is_compressed(file):
        return size
    with file.open("rb") as content:
        sample = content.read(_SAMPLE_BYTES)
    return round(size * len(sample.decode("utf-8", "ignore")) / max(len(sample), 1))


def is_compressed(file: Path) -> bool:
    """Return whether a file is compressed. Parquet files count as compressed."""
    return detect_kind_from_name(file) == "parquet" or file.suffix.lower() in COMPRESSION_SUFFIXES


def _reads_folder(path: Path, folder: Path) -> bool:
    """Return whether reading all files of ``path`` includes ``folder``.

    Hidden folders are not read.
    """
    if not path.is_dir() or not folder.resolve().is_relative_to(path.resolve()):
        return False
    parts = folder.resolve().relative_to(path.resolve()).parts
    return not any(part.startswith(".") for part in parts)


def read_squad(path: Path) -> dict[str, Any]:
    """Return the content of a SQuAD file; the key "data" has the list of articles.

    Raises:
        TaskError: The file does not have the SQuAD format.
    """
    try:
        content: dict[str, Any] = dict(json.loads(path.read_text(encoding="utf-8")))
        is_valid = all(isinstance(text, str) for text in _iterate_squad_texts(content))
    except (ValueError, LookupError, TypeError):
        is_valid = False
    if not is_valid:
        raise TaskError(
            f"{path}: not in the SQuAD format; use JSON with a list of articles under data, where "
            "articles have paragraphs, and paragraphs have a context and questions under qas"
        )
    return content


def _iterate_squad_texts(content: dict[str, Any]) -> Iterator[Any]:
    """Yield the contexts and questions of a SQuAD file, which should be strings."""
    for article in content["data"]:
        for paragraph in article["paragraphs"]:
            yield paragraph["context"]
            for question in paragraph["qas"]:
                yield question["question"]


def subsample_squad(path: Path, article_step: int, out: Path) -> Path:
    """Write every n-th article of a SQuAD file to ``out``, and return ``out``."""
    content = read_squad(path)
    content["data"] = content["data"][::article_step]
    write_atomic(out, json.dumps(content, ensure_ascii=False))
    return out
