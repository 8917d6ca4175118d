"""The package's source as syntax trees, for the tests of its structure.

It never imports what it reads.
"""

import ast
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest


@dataclass(frozen=True)
class Module:
    """One source file of the package."""

    name: str  # dotted, without a final ``__init__``
    path: Path
    tree: ast.Module
    lines: int

    @property
    def room(self) -> str:
        """Return the first name below ``bertsmith``, the room that the module belongs to."""
        if self.name == "bertsmith":
            return "__init__"
        return self.name.split(".")[1]

    def imports(self) -> Iterator[tuple[str, int, bool]]:
        """Yield each imported dotted name, its line, and whether it stands inside a function."""
        inner = {
            id(node)
            for function in ast.walk(self.tree)
            if isinstance(function, ast.FunctionDef | ast.AsyncFunctionDef)
            for node in ast.walk(function)
        }
        for node in ast.walk(self.tree):
            if isinstance(node, ast.Import):
                for alias in node.names:
                    yield alias.name, node.lineno, id(node) in inner
            elif isinstance(node, ast.ImportFrom):
                assert node.level == 0, f"{self.path}:{node.lineno}: a relative import"
                for alias in node.names:
                    yield f"{node.module}.{alias.name}", node.lineno, id(node) in inner
            elif (
                isinstance(node, ast.Constant)
                and re.fullmatch(r"bertsmith(\.\w+)+", str(node.value))
                and self._imports_dynamically
            ):
                # A dotted name that `import_module` will import.
                yield str(node.value), node.lineno, True

    @property
    def _imports_dynamically(self) -> bool:
        """Return whether the module calls ``importlib.import_module``."""
        return any(
            isinstance(node, ast.ImportFrom)
            and node.module == "importlib"
            and any(alias.name == "import_module" for alias in node.names)
            for node in ast.walk(self.tree)
        )


@pytest.fixture(scope="session")
def modules(root: Path) -> dict[str, Module]:
    """Return every module of the package by its dotted name."""
    found = {}
    for path in sorted((root / "bertsmith").rglob("*.py")):
        parts = path.relative_to(root).with_suffix("").parts
        name = ".".join(parts[:-1] if parts[-1] == "__init__" else parts)
        text = path.read_text(encoding="utf-8")
        found[name] = Module(name, path, ast.parse(text), text.count("\n"))
    return found
