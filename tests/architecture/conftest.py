"""Provides the parsed source files of the package to the tests."""

import ast
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest


@dataclass(frozen=True)
class Module:
    """A source file of the package.

    Attributes:
        name: Dotted name, without a final ``__init__``.
        path: Path of the file.
        tree: Syntax tree.
        num_lines: Number of lines in the file.
    """

    name: str
    path: Path
    tree: ast.Module
    num_lines: int

    @property
    def subpackage(self) -> str:
        """The first name below ``bertsmith``, such as ``model`` or ``errors``."""
        if self.name == "bertsmith":
            return "__init__"
        return self.name.split(".")[1]

    def iterate_imports(self) -> Iterator[tuple[str, int, bool]]:
        """Yield each imported dotted name, its line, and whether it is inside a function."""
        nodes_in_functions = {
            id(node)
            for function in ast.walk(self.tree)
            if isinstance(function, ast.FunctionDef | ast.AsyncFunctionDef)
            for node in ast.walk(function)
        }
        for node in ast.walk(self.tree):
            if isinstance(node, ast.Import):
                for alias in node.names:
                    yield alias.name, node.lineno, id(node) in nodes_in_functions
            elif isinstance(node, ast.ImportFrom):
                assert node.level == 0, f"{self.path}:{node.lineno}: relative import"
                for alias in node.names:
                    is_in_function = id(node) in nodes_in_functions
                    yield f"{node.module}.{alias.name}", node.lineno, is_in_function
        for name, line in self._iterate_dynamic_imports():
            yield name, line, True

    def _iterate_dynamic_imports(self) -> Iterator[tuple[str, int]]:
        """Yield the names that ``importlib.import_module`` may import, and their lines.

        Every string that looks like a module of the package counts as such a name. The prefix of an
        f-string such as ``f"bertsmith.bundle.{name}"`` is combined with every other string of the
        file.
        """
        calls_import_module = any(
            "import_module" in (getattr(node, "id", None), getattr(node, "attr", None))
            for node in ast.walk(self.tree)
        )
        if not calls_import_module:
            return
        strings = [
            (node.value, node.lineno)
            for node in ast.walk(self.tree)
            if isinstance(node, ast.Constant) and isinstance(node.value, str)
        ]
        for text, line in strings:
            if re.fullmatch(r"bertsmith(\.\w+)+", text):
                yield text, line
        prefixes = [text for text, _ in strings if re.fullmatch(r"bertsmith(\.\w+)*\.", text)]
        for prefix in prefixes:
            for text, line in strings:
                if re.fullmatch(r"\w+(\.\w+)*", text):
                    yield prefix + text, line


@pytest.fixture(scope="session")
def modules(root: Path) -> dict[str, Module]:
    """Return every module of the package, keyed by dotted name."""
    modules = {}
    for path in sorted((root / "bertsmith").rglob("*.py")):
        parts = path.relative_to(root).with_suffix("").parts
        name = ".".join(parts[:-1] if parts[-1] == "__init__" else parts)
        source = path.read_text(encoding="utf-8")
        modules[name] = Module(name, path, ast.parse(source), source.count("\n"))
    return modules
