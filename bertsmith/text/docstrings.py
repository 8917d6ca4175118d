"""Extracts English text from the docstrings of the installed Python packages.

This gives every machine some real text without a download. The packages are parsed, never
imported.
"""

import ast
import gc
import os
import re
import signal
import sysconfig
import warnings
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import Future, ProcessPoolExecutor
from dataclasses import dataclass
from multiprocessing import get_context
from pathlib import Path
from typing import Final

from bertsmith.progress import NullProgress, Progress
from bertsmith.text.deduplication import SeenTexts
from bertsmith.text.docstring_prose import extract_prose

#: Folders that are skipped: tests, and copies of other packages.
_SKIPPED_FOLDERS: Final = frozenset(
    (
        *("test", "tests", "testing", "idle_test", "turtledemo", "lib2to3"),
        *("_vendor", "vendor", "vendored", "_distutils_hack"),
        *("__pycache__", "site-packages", "dist-packages", "node_modules"),
    )
)
#: Minimum number of bytes in triple-quoted strings; files with fewer are not parsed, to save time.
_MIN_QUOTED_BYTES: Final = 400
#: Maximum size of a file; larger files are data or generated code.
_MAX_FILE_BYTES: Final = 4 << 20
#: Minimum number of sentences in a module; modules with fewer are left out.
_MIN_SENTENCES: Final = 3
#: Number of files per task of a worker process.
_BATCH_FILES: Final = 32
#: Maximum number of tasks that are submitted to the workers at a time.
_MAX_PENDING: Final = 16
_TRIPLE_QUOTED: Final = re.compile(
    rb'"""(?:[^"\\]|\\.|"(?!""))*"""|\'\'\'(?:[^\'\\]|\\.|\'(?!\'\'))*\'\'\''
)


@dataclass(frozen=True)
class ModuleProse:
    """The prose of a module's docstrings.

    Attributes:
        module: Full name of the module.
        paragraphs: Paragraphs, each a tuple of sentences.
    """

    module: str
    paragraphs: tuple[tuple[str, ...], ...]


def find_package_roots() -> list[Path]:
    """Return the folders of the standard library and of the installed packages."""
    paths = sysconfig.get_paths()
    roots = [Path(paths[name]).resolve() for name in ("stdlib", "purelib", "platlib")]
    return list(dict.fromkeys(roots))


def find_modules(folders: Iterable[Path]) -> list[tuple[str, Path]]:
    """Return the name and file of each module below ``folders``, sorted by name."""
    files: dict[str, Path] = {}
    for root in folders:
        for folder, subfolders, names in os.walk(root):
            subfolders[:] = [
                name for name in subfolders if name not in _SKIPPED_FOLDERS and name[0] != "."
            ]
            for name in names:
                if name.endswith(".py"):
                    file = Path(folder, name)
                    parts = file.relative_to(root).with_suffix("").parts
                    module = ".".join(parts).removesuffix(".__init__")
                    files.setdefault(module, file)
    return sorted(files.items())


def read_documentation(
    folders: Sequence[Path] | None = None,
    processes: int = 1,
    progress: Progress | None = None,
) -> Iterator[ModuleProse]:
    """Yield the prose of each documented module, sorted by name, without repeated sentences.

    Reading takes a few seconds per hundred megabytes of source code.

    Args:
        folders: Where to look for modules; None for all installed packages.
        processes: Number of worker processes; the result does not depend on it.
        progress: Receives the progress.
    """
    progress = NullProgress() if progress is None else progress
    files = find_modules(find_package_roots() if folders is None else folders)
    progress.start("Reading documentation", len(files), "modules")
    seen = SeenTexts()
    for num_files, modules in _read_batches(files, processes):
        for module in modules:
            paragraphs = []
            for paragraph in module.paragraphs:
                new_sentences = tuple(sentence for sentence in paragraph if seen.add(sentence))
                if new_sentences:
                    paragraphs.append(new_sentences)
            num_sentences = sum(len(paragraph) for paragraph in paragraphs)
            if num_sentences >= _MIN_SENTENCES:
                yield ModuleProse(module.module, tuple(paragraphs))
        progress.advance(num_files)
    progress.finish()


def _read_batches(
    files: Sequence[tuple[str, Path]], processes: int
) -> Iterator[tuple[int, list[ModuleProse]]]:
    """Yield, for each batch of files in order, the number of files and the prose of the modules."""
    batches = [files[start : start + _BATCH_FILES] for start in range(0, len(files), _BATCH_FILES)]
    if processes <= 1:
        for batch in batches:
            yield len(batch), read_modules(batch)
        return
    # Forked processes would inherit locks held by the caller's threads.
    pool = ProcessPoolExecutor(processes, get_context("spawn"), _prepare_worker)
    try:
        pending: list[tuple[int, Future[list[ModuleProse]]]] = []
        for batch in batches:
            pending.append((len(batch), pool.submit(read_modules, batch)))
            if len(pending) >= _MAX_PENDING:
                num_files, future = pending.pop(0)
                yield num_files, future.result()
        for num_files, future in pending:
            yield num_files, future.result()
    finally:
        pool.shutdown(cancel_futures=True)


def _prepare_worker() -> None:
    """Configure signals and garbage collection of a worker process."""
    # The parent process handles Ctrl-C, which reaches the workers too.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    # Syntax trees have no reference cycles, so garbage collection would free nothing, but take a
    # fifth of the time.
    gc.disable()


def read_modules(files: Sequence[tuple[str, Path]]) -> list[ModuleProse]:
    """Return the prose of the modules (name and file) whose docstrings contain prose."""
    modules = []
    for name, file in files:
        paragraphs = [
            tuple(paragraph)
            for docstring in read_docstrings(file)
            for paragraph in extract_prose(docstring)
        ]
        if paragraphs:
            modules.append(ModuleProse(name, tuple(paragraphs)))
    return modules


def read_docstrings(file: Path) -> Iterator[str]:
    """Yield the docstrings of a file in source order; none if it has syntax errors."""
    try:
        source = file.read_bytes()
    except OSError:
        return
    num_quoted_bytes = sum(len(match[0]) for match in _TRIPLE_QUOTED.finditer(source))
    if num_quoted_bytes < _MIN_QUOTED_BYTES or len(source) > _MAX_FILE_BYTES:
        return
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            tree = ast.parse(source)
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        # Packages also contain templates and files for other Python versions.
        return
    yield from _walk_docstrings(tree)


def _walk_docstrings(
    node: ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef,
) -> Iterator[str]:
    """Yield the docstrings of a node and of the definitions in its body, in source order."""
    docstring = ast.get_docstring(node, clean=False)
    if docstring:
        yield docstring
    for child in node.body:
        if isinstance(child, ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            yield from _walk_docstrings(child)
        elif isinstance(child, ast.Expr) and isinstance(child.value, ast.Call):
            yield from _find_docstrings_in_call(child.value)


def _find_docstrings_in_call(call: ast.Call) -> Iterator[str]:
    """Yield the docstring in a call such as ``add_docstr(torch.abs, "...")``.

    Packages use such calls to document functions that are written in C.
    """
    name = ""
    if isinstance(call.func, ast.Name):
        name = call.func.id
    elif isinstance(call.func, ast.Attribute):
        name = call.func.attr
    if not (name.startswith("add_") and "doc" in name):
        return
    for argument in call.args:
        # The string may be followed by .format(...) or be inside a tuple (name, string).
        for node in ast.walk(argument):
            if (
                isinstance(node, ast.Constant)
                and isinstance(node.value, str)
                and "\n" in node.value
            ):
                yield node.value
