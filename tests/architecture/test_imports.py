"""Tests of the import rules: one direction, no cycles, no torch in text and data."""

import ast
import re
import sys
import tomllib
from graphlib import CycleError, TopologicalSorter
from importlib.metadata import packages_distributions
from pathlib import Path
from typing import Any

import pytest

from tests.architecture.conftest import Module

#: Layers of subpackages, lowest first. A subpackage may import only from lower layers.
LAYERS: tuple[frozenset[str], ...] = (
    frozenset(
        {
            "errors",
            "compatibility",
            "settings",
            "files",
            "memory",
            "plurals",
            "progress",
            "splitmix64",
            "version",
        }
    ),
    frozenset({"text", "model"}),
    frozenset({"runtime", "data", "bundle"}),
    frozenset({"tasks", "interop"}),
    frozenset({"train"}),
    frozenset({"use"}),
    frozenset({"serve", "lab"}),
    frozenset({"cli"}),
    frozenset({"__init__", "__main__"}),
)
FOUNDATION = LAYERS[0]
LAYER_OF_SUBPACKAGE = {name: level for level, layer in enumerate(LAYERS) for name in layer}
#: (importer, imported) pairs that are forbidden although they point to a lower layer.
FORBIDDEN_IMPORTS = {("data", "model")}
#: Subpackages that do not import torch, so that preparing text does not load it.
SUBPACKAGES_WITHOUT_TORCH = frozenset({*FOUNDATION, "text", "data"})
#: Optional or slow packages that functions may import.
LAZY_PACKAGES = frozenset({
    "huggingface_hub", "kiwipiepy", "matplotlib", "nncf", "onnx", "onnxruntime", "openvino",
    "openvino_telemetry", "pyarrow", "tensorboard", "sklearn", "torch.utils.tensorboard", "usearch",
})  # fmt: skip

#: Packages that always come with a dependency.
PARENT_DEPENDENCIES = {
    "httptools": "uvicorn",
    "openvino_telemetry": "openvino",
    "pydantic_core": "pydantic",
    "starlette": "fastapi",
    "typing_extensions": "pydantic",
}


def find_module(imported_name: str, modules: dict[str, Any]) -> str | None:
    """Return the module of Bertsmith that contains an imported name; None for other packages."""
    while imported_name:
        if imported_name in modules:
            return imported_name
        imported_name = imported_name.rpartition(".")[0]
    return None


def test_every_subpackage_has_a_layer(modules: dict[str, Any]) -> None:
    """Each top-level module or folder of the package is listed in LAYERS."""
    assert {module.subpackage for module in modules.values()} <= set(LAYER_OF_SUBPACKAGE)


def test_imports_point_to_lower_layers(modules: dict[str, Any]) -> None:
    """No module imports from a higher layer or from another subpackage of its layer."""
    violations = []
    for module in modules.values():
        for name, line, _ in module.iterate_imports():
            imported = find_module(name, modules)
            if imported is None:
                continue
            source, target = module.subpackage, modules[imported].subpackage
            is_within_foundation = {source, target} <= FOUNDATION
            is_lower = (
                LAYER_OF_SUBPACKAGE[target] < LAYER_OF_SUBPACKAGE[source]
                and (source, target) not in FORBIDDEN_IMPORTS
            )
            if not (source == target or is_within_foundation or is_lower):
                violations.append(f"{module.path}:{line}: {source} imports {target} ({name})")
    assert not violations, "\n".join(violations)


def test_pretraining_and_finetuning_import_only_the_engine(modules: dict[str, Any]) -> None:
    """They do not import each other. The engine imports neither of them, nor bertsmith.data."""
    packages = {f"bertsmith.train.{name}" for name in ("engine", "pretraining", "finetuning")}
    violations = []
    for module in modules.values():
        source = ".".join(module.name.split(".")[:3])
        for name, line, _ in module.iterate_imports():
            target = ".".join(name.split(".")[:3])
            forbidden = packages - {source, "bertsmith.train.engine"}
            if source in packages and target in forbidden:
                violations.append(f"{module.path}:{line}: {source} imports {target}")
            if source == "bertsmith.train.engine" and target.startswith("bertsmith.data"):
                violations.append(f"{module.path}:{line}: the engine imports {target}")
    assert not violations, "\n".join(violations)


def test_there_are_no_import_cycles(modules: dict[str, Any]) -> None:
    """No module imports itself through other modules; imports inside functions count too."""
    graph: dict[str, set[str]] = {}
    for module in modules.values():
        if module.name != "bertsmith":
            imported = {find_module(name, modules) for name, _, _ in module.iterate_imports()}
            graph[module.name] = {
                name for name in imported if name not in {None, module.name, "bertsmith"}
            }
    try:
        # Raises an error if there is a cycle.
        TopologicalSorter(graph).prepare()
    except CycleError as error:
        pytest.fail(" -> ".join(error.args[1]))


@pytest.mark.parametrize(
    "source",
    [
        "from importlib import import_module\nimport_module('bertsmith.text.corpus')",
        "import importlib\nimportlib.import_module('bertsmith.text.corpus')",
        "import importlib\nname = 'corpus'\nimportlib.import_module(f'bertsmith.text.{name}')",
    ],
    ids=["function", "attribute", "f-string"],
)
def test_import_module_counts_as_an_import(source: str) -> None:
    """``iterate_imports`` includes modules that ``importlib.import_module`` imports."""
    module = Module("bertsmith.example", Path("example.py"), ast.parse(source), num_lines=3)
    assert "bertsmith.text.corpus" in {name for name, _, _ in module.iterate_imports()}


def test_text_and_data_do_not_import_torch(modules: dict[str, Any]) -> None:
    """The subpackages for text and data do not import torch."""
    violations = [
        f"{module.path}:{line}"
        for module in modules.values()
        if module.subpackage in SUBPACKAGES_WITHOUT_TORCH
        for name, line, _ in module.iterate_imports()
        if name.split(".")[0] == "torch"
    ]
    assert not violations, "\n".join(violations)


def test_imports_are_at_module_top(modules: dict[str, Any]) -> None:
    """Only commands, ``__init__`` files and optional packages have imports inside functions."""
    violations = [
        f"{module.path}:{line}: {name}"
        for module in modules.values()
        if module.subpackage not in {"cli", "__main__"} and module.path.name != "__init__.py"
        for name, line, is_in_function in module.iterate_imports()
        if is_in_function
        and not any(name == lazy or name.startswith(f"{lazy}.") for lazy in LAZY_PACKAGES)
    ]
    assert not violations, "\n".join(violations)


def test_imported_packages_are_dependencies(modules: dict[str, Any], root: Path) -> None:
    """Packages imported at module top are core dependencies, the others at least in an extra.

    The server is imported only with its extra. Requirements of dependencies do not count.
    """
    project = tomllib.loads((root / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    extras = project["optional-dependencies"]

    def list_names(requirements: list[str]) -> set[str]:
        names = {re.split(r"[>\[]", requirement)[0] for requirement in requirements}
        return {name.replace("_", "-") for name in names}

    core = list_names(project["dependencies"])
    optional = {
        name for extra in extras.keys() - {"dev", "docs"} for name in list_names(extras[extra])
    }
    distributions = packages_distributions()
    violations = []
    for module in modules.values():
        for name, line, is_in_function in module.iterate_imports():
            package = name.split(".")[0]
            if package == "bertsmith" or package in sys.stdlib_module_names:
                continue
            names = {PARENT_DEPENDENCIES.get(package, package), *distributions.get(package, ())}
            needs_core = not is_in_function and module.subpackage != "serve"
            names = {name.replace("_", "-") for name in names}
            if not names & (core if needs_core else core | optional):
                violations.append(f"{module.path}:{line}: {package}")
    assert not violations, "\n".join(violations)


def test_fixture_contains_the_package(modules: dict[str, Any]) -> None:
    """The ``modules`` fixture is not empty, so tests that use it check something."""
    assert {"bertsmith", "bertsmith.errors", "bertsmith.cli.main"} <= set(modules)
