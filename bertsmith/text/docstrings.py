"""Gathers real English that every machine has: the documentation of its Python packages.

It never imports a package: it reads the source files, and only their documentation strings.
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

#: Folders without documentation of their own: tests, and copies of other packages.
_PASSED: Final = frozenset(
    (
        *("test", "tests", "testing", "idle_test", "turtledemo", "lib2to3"),
        *("_vendor", "vendor", "vendored", "_distutils_hack"),
        *("__pycache__", "site-packages", "dist-packages", "node_modules"),
    )
)
#: Bytes of triple-quoted text below which a file is not worth the time that parsing takes.
_LEAST_QUOTED: Final = 400
#: A larger file is data or generated code.
_LARGEST: Final = 4 << 20
#: Sentences below which a module is no document.
_LEAST_SENTENCES: Final = 3
#: Files given to a worker at once, and batches under way.
_BATCH, _AHEAD = 32, 16
_QUOTED: Final = re.compile(
    rb'"""(?:[^"\\]|\\.|"(?!""))*"""|\'\'\'(?:[^\'\\]|\\.|\'(?!\'\'))*\'\'\''
)


@dataclass(frozen=True)
class ModuleProse:
    """A module's documentation: its paragraphs, each as its sentences."""

    module: str
    paragraphs: tuple[tuple[str, ...], ...]


def find_package_roots() -> list[Path]:
    """Return the folders of the standard library and of the installed packages."""
    paths = sysconfig.get_paths()
    found = [Path(paths[name]).resolve() for name in ("stdlib", "purelib", "platlib")]
    return list(dict.fromkeys(found))


def find_modules(folders: Iterable[Path]) -> list[tuple[str, Path]]:
    """Return the modules below ``folders``, by name, each with its file; sorted by name."""
    found: dict[str, Path] = {}
    for root in folders:
        for folder, below, names in os.walk(root):
            below[:] = [name for name in below if name not in _PASSED and name[0] != "."]
            for name in names:
                if name.endswith(".py"):
                    file = Path(folder, name)
                    parts = file.relative_to(root).with_suffix("").parts
                    module = ".".join(parts).removesuffix(".__init__")
                    found.setdefault(module, file)
    return sorted(found.items())


def read_documentation(
    folders: Sequence[Path] | None = None,
    processes: int = 1,
    progress: Progress | None = None,
) -> Iterator[ModuleProse]:
    """Yield the prose of each documented module, by name; no sentence comes twice.

    The result does not depend on ``processes``. Needs a few seconds a hundred megabytes of source.
    """
    progress = NullProgress() if progress is None else progress
    files = find_modules(find_package_roots() if folders is None else folders)
    progress.start("Reading documentation", len(files), "modules")
    seen = SeenTexts()
    for count, found in _parsed(files, processes):
        for module in found:
            kept = tuple(
                new
                for paragraph in module.paragraphs
                if (new := tuple(filter(seen.add, paragraph)))
            )
            if sum(map(len, kept)) >= _LEAST_SENTENCES:
                yield ModuleProse(module.module, kept)
        progress.advance(count)
    progress.finish()


def _parsed(
    files: Sequence[tuple[str, Path]], processes: int
) -> Iterator[tuple[int, list[ModuleProse]]]:
    """Yield the prose of each batch of files, in order, with the batch's size."""
    batches = [files[start : start + _BATCH] for start in range(0, len(files), _BATCH)]
    if processes <= 1:
        for batch in batches:
            yield len(batch), read_modules(batch)
        return
    # A fresh process each, since a fork would copy the threads' locks of whoever calls this.
    pool = ProcessPoolExecutor(processes, get_context("spawn"), _prepare_worker)
    try:
        waiting: list[tuple[int, Future[list[ModuleProse]]]] = []
        for batch in batches:
            waiting.append((len(batch), pool.submit(read_modules, batch)))
            if len(waiting) >= _AHEAD:
                count, first = waiting.pop(0)
                yield count, first.result()
        for count, future in waiting:
            yield count, future.result()
    finally:
        pool.shutdown(cancel_futures=True)


def _prepare_worker() -> None:
    """Let the parent alone answer Ctrl-C; syntax trees need no collector, which costs a fifth."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    gc.disable()


def read_modules(files: Sequence[tuple[str, Path]]) -> list[ModuleProse]:
    """Return the prose of those modules that have some."""
    found = []
    for module, file in files:
        paragraphs = [
            tuple(paragraph)
            for docstring in read_docstrings(file)
            for paragraph in extract_prose(docstring)
        ]
        if paragraphs:
            found.append(ModuleProse(module, tuple(paragraphs)))
    return found


def read_docstrings(file: Path) -> Iterator[str]:
    """Yield a file's documentation strings in the order of the source; none if it has errors."""
    try:
        source = file.read_bytes()
    except OSError:
        return
    quoted = sum(len(match[0]) for match in _QUOTED.finditer(source))
    if quoted < _LEAST_QUOTED or len(source) > _LARGEST:
        return
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            tree = ast.parse(source)
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        # Templates and files for other Python versions stand among the packages.
        return
    yield from _of(tree)


def _of(node: ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef) -> Iterator[str]:
    if docstring := ast.get_docstring(node, clean=False):
        yield docstring
    for child in node.body:
        if isinstance(child, ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            yield from _of(child)
        elif isinstance(child, ast.Expr) and isinstance(child.value, ast.Call):
            yield from _added(child.value)


def _added(call: ast.Call) -> Iterator[str]:
    """Yield what ``add_docstr(torch.abs, "...")`` and its like document: functions written in C."""
    name = call.func.attr if isinstance(call.func, ast.Attribute) else ""
    name = call.func.id if isinstance(call.func, ast.Name) else name
    if not (name.startswith("add_") and "doc" in name):
        return
    for argument in call.args:
        # The string may be followed by .format(...) or stand in a tuple (name, string).
        for node in ast.walk(argument):
            if (
                isinstance(node, ast.Constant)
                and isinstance(node.value, str)
                and "\n" in node.value
            ):
                yield node.value
