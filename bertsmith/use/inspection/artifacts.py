"""Identify the kind of artifact at a path, such as a tokenizer, a store, a model or a run.

Artifacts are identified mostly by file names. Importing this module does not load torch.
"""

from pathlib import Path
from typing import Literal

from bertsmith.bundle.directory import WEIGHT_FILES, is_reference_model
from bertsmith.compatibility import OLD_INDEX_FILES
from bertsmith.data.plan import PARTS_DIR, PLAN_FILE
from bertsmith.data.store import MANIFEST_FILE
from bertsmith.errors import InputError
from bertsmith.text.tokenizer_files import TOKENIZER_FILE, VOCAB_FILE

ArtifactKind = Literal[
    "tokenizer", "store", "model", "run", "runs", "checkpoint", "tensors", "settings", "index"
]

#: For each kind of directory, the groups of files that identify it. All files of one of its groups
#: must exist. The order of the kinds matters, because a model directory contains a tokenizer, and a
#: released model also the settings of its run.
_DIRECTORY_FILES: dict[ArtifactKind, tuple[tuple[str, ...], ...]] = {
    "model": tuple(("config.json", weights) for weights in WEIGHT_FILES),
    "run": (("settings.toml",),),
    # An unfinished store has parts but no manifest. Opening it raises an error that says this.
    "store": ((MANIFEST_FILE,), (f"{PARTS_DIR}/{PLAN_FILE}",)),
    "checkpoint": (("weights.safetensors", "state.json"),),
    "tokenizer": ((TOKENIZER_FILE,), (VOCAB_FILE,)),
    "index": (("index.json", "offsets.npy"), ("index.json", OLD_INDEX_FILES["offsets.npy"])),
}
#: Files whose path may be given instead of the path of their directory.
_FILES_OF_DIRECTORIES = (
    MANIFEST_FILE, "config.json", "bertsmith.json", "state.json", "metrics.jsonl",
)  # fmt: skip

ARTIFACT_DESCRIPTIONS = (
    f"a tokenizer directory or its {VOCAB_FILE}",
    f"a store (with {MANIFEST_FILE})",
    "a model directory (with config.json and model.safetensors) or a model of the hub (OWNER/NAME)",
    "a reference model (by name)",
    "a RUN directory (with settings.toml), or a directory with a RUN for each seed",
    "a checkpoint (RUN/checkpoints/step-N)",
    "a .safetensors file",
    "a settings file (.toml)",
    "an index (.index, made by embed)",
)


def identify_artifact(path: Path) -> tuple[ArtifactKind, Path]:
    """Identify an artifact.

    Returns:
        The kind of artifact, and the path to open. For a file such as config.json, this is the
        directory that contains it.

    Raises:
        InputError: The path is not a known artifact.
    """
    if path.is_dir():
        kind = _identify_directory(path)
    elif path.is_file():
        if path.name in _FILES_OF_DIRECTORIES:
            directory_kind = _identify_directory(path.parent)
            if directory_kind is not None:
                return directory_kind, path.parent
        kind = _identify_file(path)
    elif is_reference_model(path):
        return "model", path
    elif len(path.parts) == 2 and not path.parent.exists():
        # There is no directory OWNER, so the path OWNER/NAME can only be a model of the hub.
        return "model", path
    else:
        raise InputError(
            f"{path}: no such file or directory; expected one of: {_describe_artifacts()}"
        )
    if kind is None:
        raise InputError(f"{path}: unknown contents; expected one of: {_describe_artifacts()}")
    return kind, path


def _describe_artifacts() -> str:
    return ", ".join(ARTIFACT_DESCRIPTIONS)


def _identify_directory(path: Path) -> ArtifactKind | None:
    """Return the kind of a directory; None if it is not a known artifact."""
    for kind, groups in _DIRECTORY_FILES.items():
        if any(all((path / name).exists() for name in group) for group in groups):
            return kind
    return "runs" if any(path.glob("*seed-*/settings.toml")) else None


def _identify_file(path: Path) -> ArtifactKind | None:
    """Return the kind of a file; None if it is not a known artifact."""
    if path.name == TOKENIZER_FILE:
        return "tokenizer"
    if path.suffix == ".toml":
        return "settings"
    if path.suffix == ".safetensors":
        return "tensors"
    # A text file with the line "[MASK]" is a vocabulary.
    if path.name == VOCAB_FILE or (path.suffix == ".txt" and _has_mask_line(path)):
        return "tokenizer"
    return None


def _has_mask_line(path: Path) -> bool:
    with path.open("rb") as file:
        return any(line.strip() == b"[MASK]" for line in file)
