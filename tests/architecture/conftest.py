"""A fixture with the parsed source files of the package."""

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
            elif (
                isinstance(node, ast.Constant)
                and re.fullmatch(r"bertsmith(\.\w+)+", str(node.value))
                and self._uses_import_module
            ):
                # A module name that is passed to import_module.
                yield str(node.value), node.lineno, True

    @property
    def _uses_import_module(self) -> bool:
        """Whether the module can import others with ``importlib.import_module``."""
        return any(
            isinstance(node, ast.ImportFrom)
            and node.module == "importlib"
            and any(alias.name == "import_module" for alias in node.names)
            for node in ast.walk(self.tree)
        )


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
