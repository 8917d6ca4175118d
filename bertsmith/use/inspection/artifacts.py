"""Tell what stands at a path: a tokenizer, a store, a model directory, a RUN, and so on.

It never opens what it recognizes, and never loads torch.
"""

from pathlib import Path
from typing import Literal

from bertsmith.data.store import MANIFEST_FILE
from bertsmith.errors import InputError
from bertsmith.text.tokenizer_files import TOKENIZER_FILE, VOCAB_FILE

ArtifactKind = Literal[
    "tokenizer", "store", "model", "run", "runs", "checkpoint", "tensors", "settings", "index"
]

#: The forms of a model's weights.
_WEIGHTS = (
    "model.safetensors",
    "model.safetensors.index.json",
    "pytorch_model.bin",
    "pytorch_model.bin.index.json",
)
#: What each directory is known by, most telling first: a RUN holds a model, a model a tokenizer.
#: Any one group of names is enough; of a group all must be there.
_DIRECTORIES: dict[ArtifactKind, tuple[tuple[str, ...], ...]] = {
    "run": (("settings.toml",),),
    # A store that is being made has only its parts; opening it says so.
    "store": ((MANIFEST_FILE,), ("parts",)),
    "checkpoint": (("weights.safetensors", "state.json"),),
    "model": tuple(("config.json", form) for form in _WEIGHTS),
    "tokenizer": ((TOKENIZER_FILE,), (VOCAB_FILE,)),
    "index": (("index.json", "places.npy"),),
}
#: Files that speak for the directory they stand in.
_SPOKESMEN = (MANIFEST_FILE, "config.json", "bertsmith.json", "state.json", "metrics.jsonl")

ARTIFACT_DESCRIPTIONS = (
    f"a tokenizer directory or its {VOCAB_FILE}",
    f"a store (with {MANIFEST_FILE})",
    "a model directory (with config.json and model.safetensors) or a model of the hub (OWNER/NAME)",
    "a RUN (with settings.toml, or one such for each seed)",
    "a checkpoint (RUN/checkpoints/step-N)",
    "a .safetensors file",
    "a settings file (.toml)",
    "an index (.index, made by embed)",
)


def identify_artifact(path: Path) -> tuple[ArtifactKind, Path]:
    """Return what stands at ``path`` and the path to open: a file may speak for its directory.

    Raises QuestionError for anything else, naming all that is known.
    """
    if path.is_dir():
        found = _directory(path)
    elif path.is_file():
        if path.name in _SPOKESMEN and (kind := _directory(path.parent)):
            return kind, path.parent
        found = _file(path)
    elif len(path.parts) == 2 and not path.parent.exists():
        # Nothing of it is here, so it can only be a model of the hub.
        return "model", path
    else:
        raise InputError(f"{path}: no such file or directory; expected one of: {_known()}")
    if found is None:
        raise InputError(f"{path}: found nothing known here; expected one of: {_known()}")
    return found, path


def _known() -> str:
    return ", ".join(ARTIFACT_DESCRIPTIONS)


def _directory(path: Path) -> ArtifactKind | None:
    for kind, groups in _DIRECTORIES.items():
        if any(all((path / name).exists() for name in group) for group in groups):
            return kind
    return "runs" if any(path.glob("*seed-*/settings.toml")) else None


def _file(path: Path) -> ArtifactKind | None:
    if path.name == TOKENIZER_FILE:
        return "tokenizer"
    if path.suffix == ".toml":
        return "settings"
    if path.suffix == ".safetensors":
        return "tensors"
    # A vocabulary under any name: a word a line, [MASK] among the first ones or in the middle.
    if path.name == VOCAB_FILE or (path.suffix == ".txt" and _has_mask(path)):
        return "tokenizer"
    return None


def _has_mask(path: Path) -> bool:
    with path.open("rb") as file:
        return any(line.strip() == b"[MASK]" for line in file)
