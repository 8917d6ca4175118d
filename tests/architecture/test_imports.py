"""Imports go one way, from the ground up to the command line.

These tests never run the package's code, they read it.
"""

from graphlib import CycleError, TopologicalSorter
from typing import Any

import pytest

#: The rooms, lowest first. A room may import any lower one, and none beside it.
LAYERS: tuple[frozenset[str], ...] = (
    frozenset({"errors", "compatibility", "settings", "files", "progress", "version"}),
    frozenset({"text", "model"}),
    frozenset({"runtime", "data", "bundle"}),
    frozenset({"tasks", "interop"}),
    frozenset({"train"}),
    frozenset({"use"}),
    frozenset({"serve", "lab"}),
    frozenset({"cli"}),
    frozenset({"__init__", "__main__"}),
)
HEIGHT = {room: height for height, layer in enumerate(LAYERS) for room in layer}
#: Lower, and all the same out of sight: the store and its stream are numpy only.
HIDDEN = {("data", "model")}
#: Rooms whose modules never name torch, so that preparing text never pays for loading it.
WITHOUT_TORCH = frozenset({*LAYERS[0], "text", "data"})
#: Optional packages, and those that only one function of a room needs and that cost seconds.
EXTRAS = frozenset({
    "huggingface_hub", "kiwipiepy", "matplotlib", "onnx", "onnxruntime", "pyarrow", "tensorboard",
    "torch.utils.tensorboard", "usearch",
})  # fmt: skip


def _owner(imported: str, modules: dict[str, Any]) -> str | None:
    """Return the module of the package that an imported dotted name belongs to."""
    while imported:
        if imported in modules:
            return imported
        imported = imported.rpartition(".")[0]
    return None


def test_every_room_has_its_place(modules: dict[str, Any]) -> None:
    """Each top-level module or folder of the package stands in the order of layers."""
    assert {module.room for module in modules.values()} <= set(HEIGHT)


def test_imports_go_one_way(modules: dict[str, Any]) -> None:
    """No module imports from a room above or beside its own; data never sees the model."""
    wrong = []
    for module in modules.values():
        for name, line, _ in module.imports():
            owner = _owner(name, modules)
            if owner is None:
                continue
            here, there = module.room, modules[owner].room
            ground = {here, there} <= LAYERS[0]
            lower = HEIGHT[there] < HEIGHT[here] and (here, there) not in HIDDEN
            if not (here == there or ground or lower):
                wrong.append(f"{module.path}:{line}: {here} imports {there} ({name})")
    assert not wrong, "\n".join(wrong)


def test_no_cycles(modules: dict[str, Any]) -> None:
    """No import cycle, counting imports inside functions and by ``import_module``."""
    graph = {
        module.name: {
            owner
            for name, _, _ in module.imports()
            if (owner := _owner(name, modules)) and owner not in {module.name, "bertsmith"}
        }
        for module in modules.values()
        if module.name != "bertsmith"
    }
    try:
        list(TopologicalSorter(graph).static_order())
    except CycleError as error:
        pytest.fail(" -> ".join(error.args[1]))


def test_text_and_data_never_name_torch(modules: dict[str, Any]) -> None:
    """Corpora, vocabularies and stores need no torch."""
    wrong = [
        f"{module.path}:{line}"
        for module in modules.values()
        if module.room in WITHOUT_TORCH
        for name, line, _ in module.imports()
        if name.split(".")[0] == "torch"
    ]
    assert not wrong, "\n".join(wrong)


def test_imports_stand_at_the_top(modules: dict[str, Any]) -> None:
    """Only the command line and optional extras import inside a function."""
    wrong = [
        f"{module.path}:{line}: {name}"
        for module in modules.values()
        if module.room not in {"cli", "__init__", "__main__"}
        for name, line, inside in module.imports()
        if inside and not any(name == extra or name.startswith(f"{extra}.") for extra in EXTRAS)
    ]
    assert not wrong, "\n".join(wrong)


def test_modules_are_found(modules: dict[str, Any]) -> None:
    """The reader of the source finds the package, so the tests above look at something."""
    assert {"bertsmith", "bertsmith.errors", "bertsmith.cli.main"} <= set(modules)
