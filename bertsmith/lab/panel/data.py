"""The input files of the panel: a held-out text, minimal pairs, and the files of public tasks.

Only training and validation files are read. A public task whose validation set is not published
is split: a fixed random part of a file is held out for validation.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from bertsmith.errors import TaskError
from bertsmith.files import write_directory_once
from bertsmith.lab.panel.tasks import PanelTask
from bertsmith.lab.sources import Sources
from bertsmith.lab.stage import hash_content
from bertsmith.plurals import count_noun
from bertsmith.tasks.public import PUBLIC_TASKS, find_task_folder
from bertsmith.use.minimal_pairs import find_pair_files

#: Number of examples that are held out from a file without a validation set.
_NUM_HELD_OUT = 1000
#: Largest fraction of a file that is held out.
_MAX_HELD_OUT_FRACTION = 0.2
#: Length of the hash in the names of split files.
_HASH_LENGTH = 12


@dataclass(frozen=True)
class PanelData:
    """The input files of the panel.

    Attributes:
        folder: The folder with one subfolder for each public task, None if there is none.
        text: A file or folder with held-out text, None if there is none.
        minimal_pairs: Files of minimal pairs, or folders of such files.
        split_dir: The folder for split files.
    """

    folder: Path | None
    text: Path | None
    minimal_pairs: Sequence[Path]
    split_dir: Path

    def find_files(self, task: PanelTask) -> dict[str, Path]:
        """Return the files of a task by the role that the stages of the panel use.

        Raises:
            BertsmithError: A file is missing.
        """
        if task.evaluation == "held-out":
            if self.text is None:
                raise TaskError(
                    "held-out needs a text, but --text is missing; pass --text FILE_OR_FOLDER"
                )
            return Sources(english=self.text).find_text_files("en")
        if task.evaluation == "minimal-pairs":
            if not self.minimal_pairs:
                raise TaskError(
                    "minimal-pairs needs pairs of sentences, but --minimal-pairs is missing; pass "
                    "--minimal-pairs FILE_OR_FOLDER"
                )
            files = sorted(find_pair_files(self.minimal_pairs), key=lambda file: file.name)
            return {f"pairs {number} {file.name}": file for number, file in enumerate(files)}
        train, dev = self._find_task_files(task)
        return {"train": train, "dev": dev}

    def _find_task_files(self, task: PanelTask) -> tuple[Path, Path]:
        """Return the training and the validation file of a public task."""
        folder, public = self._find_task_folder(task), PUBLIC_TASKS[task.public_task]
        train = folder / public.train_file
        # The first file is the validation set; some tasks also list their test set.
        dev = folder / next(iter(public.dev_files.values()))
        if task.name == "nsmc":
            # NSMC has a training set and a test set, which the panel does not read.
            _check_exists(train, task)
            return _split_file(train, self.split_dir, has_blocks=False)
        if task.name == "klue-ner" and not train.exists():
            _check_exists(dev, task)
            return _split_file(dev, self.split_dir, has_blocks=True)
        for file in (train, dev):
            _check_exists(file, task)
        return train, dev

    def _find_task_folder(self, task: PanelTask) -> Path:
        """Return the folder of a public task.

        Raises:
            TaskError: There is no folder with the files of this task.
        """
        expected = f"{task.folders[0]}/{PUBLIC_TASKS[task.public_task].train_file}"
        if self.folder is None:
            raise TaskError(
                f"{task.name} needs labeled data, but --data is missing; pass --data FOLDER, where "
                f"FOLDER contains {expected}"
            )
        folder = find_task_folder(self.folder, task.public_task)
        if folder is None:
            raise TaskError(
                f"--data {self.folder}: no folder {' or '.join(task.folders)} for {task.name}; add "
                f"{_describe_files(task)}, or leave {task.name} out with --tasks"
            )
        return folder


def _describe_files(task: PanelTask) -> str:
    """Return the paths of the files of a public task, relative to the data folder."""
    public = PUBLIC_TASKS[task.public_task]
    names = [public.train_file]
    if task.name != "nsmc":
        names.append(next(iter(public.dev_files.values())))
    return " and ".join(f"{task.folders[0]}/{name}" for name in names)


def _check_exists(file: Path, task: PanelTask) -> None:
    if not file.is_file():
        raise TaskError(
            f"{file}: no such file; add it, or leave {task.name} out with --tasks (expected "
            f"{_describe_files(task)})"
        )


def _split_file(file: Path, split_dir: Path, *, has_blocks: bool) -> tuple[Path, Path]:
    """Hold out a fixed random part of a file; write both parts unless they exist.

    Args:
        file: The file.
        split_dir: The folder for the two parts.
        has_blocks: Whether examples are separated by empty lines, as in CoNLL files. Otherwise the
            first line is a header and every other line is an example.

    Returns:
        The files of the training and the validation examples.

    Raises:
        TaskError: The file is not UTF-8, or has too few examples.
    """
    folder = split_dir / f"{file.stem}-{hash_content(file)[:_HASH_LENGTH]}"
    train, dev = (folder / f"{part}{file.suffix}" for part in ("train", "dev"))
    if folder.exists():
        return train, dev
    train_text, dev_text = _split_text(file, has_blocks=has_blocks)

    def write(new: Path) -> None:
        (new / train.name).write_text(train_text, encoding="utf-8")
        (new / dev.name).write_text(dev_text, encoding="utf-8")

    write_directory_once(folder, write)
    return train, dev


def _split_text(file: Path, *, has_blocks: bool) -> tuple[str, str]:
    """Return the text of the training and of the validation examples; see ``_split_file``."""
    try:
        content = file.read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        raise TaskError(
            f"{file}: not UTF-8 text ({error.reason}); convert the file to UTF-8"
        ) from None
    separator = "\n\n" if has_blocks else "\n"
    examples = [example for example in content.split(separator) if example.strip()]
    header = [] if has_blocks else examples[:1]
    examples = examples[len(header) :]
    num_held_out = min(_NUM_HELD_OUT, round(_MAX_HELD_OUT_FRACTION * len(examples)))
    if not num_held_out:
        raise TaskError(
            f"{file}: {count_noun(len(examples), 'example')}, too few to hold some out for "
            "validation; use the complete file"
        )
    held_out = set(np.random.default_rng(0).permutation(len(examples))[:num_held_out].tolist())
    train, dev = (
        [*header, *(text for index, text in enumerate(examples) if (index in held_out) == is_dev)]
        for is_dev in (False, True)
    )
    return separator.join(train) + separator, separator.join(dev) + separator
