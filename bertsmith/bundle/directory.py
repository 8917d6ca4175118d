"""Finding model directories: local paths, run directories and ids on the Hugging Face hub."""

import re
import shlex
from pathlib import Path
from typing import Final

from bertsmith.bundle.config import CONFIG_FILE
from bertsmith.errors import ModelError

WEIGHTS_FILE, PICKLE_FILE = "model.safetensors", "pytorch_model.bin"
INDEX_FILE, PICKLE_INDEX_FILE = f"{WEIGHTS_FILE}.index.json", f"{PICKLE_FILE}.index.json"
#: Files that weights are read from, in order of preference. An index lists several shards.
WEIGHT_FILES: Final = (WEIGHTS_FILE, INDEX_FILE, PICKLE_FILE, PICKLE_INDEX_FILE)
#: OWNER/NAME, optionally followed by @ and a branch, tag or commit.
_HUB_ID: Final = re.compile(r"(?P<id>\w[\w.-]*/[\w.-]+)(?:@(?P<revision>[\w./-]+))?", re.ASCII)
#: Files downloaded along with the weights.
_METADATA_PATTERNS: Final = ("*.json", "vocab.txt", "README.md", "*_Dense/model.safetensors")
_WEIGHT_PATTERNS: Final = ("model*.safetensors", "pytorch_model*.bin")


def locate_model(model: Path | str) -> Path:
    """Return the directory of a model; models on the hub are downloaded.

    Args:
        model: A model directory, a run directory, a file of a model directory, or OWNER/NAME on
            the hub, such as "google-bert/bert-base-uncased", optionally with "@" and a revision.
            For a sentence-transformers model it may be the folder of its Transformer module.

    Raises:
        ModelError: There is no model.
    """
    path = Path(model)
    is_model_file = path.name in (CONFIG_FILE, *WEIGHT_FILES) and path.is_file()
    root = path.parent if is_model_file else path
    for directory in (root, root / "model", root / "0_Transformer"):
        if (directory / CONFIG_FILE).is_file() and find_weights_file(directory) is not None:
            return directory
    if is_hub_id(path):
        return download_from_hub(str(path))
    if not path.exists():
        raise ModelError(
            f"{path}: no such file or directory; expected a model directory, a run directory, or "
            "a model on the hub as OWNER/NAME, such as google-bert/bert-base-uncased",
        )
    if (path / "checkpoints").is_dir():
        raise ModelError(
            f"{path}: this run has not written its model yet; repeat its command to finish it, or "
            f"export its last checkpoint: bertsmith export {shlex.quote(str(path))} --to hf "
            "--out DIR",
        )
    raise ModelError(
        f"{path}: not a model directory (no {CONFIG_FILE} with {WEIGHTS_FILE} in it) and not a run "
        "directory",
    )


def is_unfinished_run(path: Path) -> bool:
    """Return whether a path is a run directory with checkpoints but no model yet."""
    return (
        (path / "settings.toml").is_file()
        and any((path / "checkpoints").glob("step-*"))
        and not (path / "model").exists()
    )


def locate_tokenizer(path: Path) -> Path:
    """Return the path to read a tokenizer from.

    For a run directory or a hub id this is the model directory. Any other path is returned
    unchanged, and the tokenizer's reader reports problems with it.

    Raises:
        ModelError: The run has no model yet, or the hub model is not available.
    """
    is_run = path.is_dir() and any((path / name).is_dir() for name in ("model", "checkpoints"))
    return locate_model(path) if is_run or is_hub_id(path) else path


def pin_model_path(model: Path | str) -> Path:
    """Return an absolute path to a model that does not depend on the working directory.

    A hub id becomes the cached directory of its current commit.
    """
    path = Path(model)
    return locate_model(path) if is_hub_id(path) else path.resolve()


def find_weights_file(directory: Path) -> str | None:
    """Return the name of the file that a directory's weights are read from, None if absent."""
    return next((name for name in WEIGHT_FILES if (directory / name).is_file()), None)


def is_hub_id(path: Path) -> bool:
    """Return whether a path can only be a hub id.

    A misspelled local path must not cause a network request. A path is therefore not a hub id if
    its first component exists, or if it ends like a file of a model or in a run's "model" folder.
    """
    owner = Path(path.parts[0]) if path.parts else path
    if path.name == "model" or path.suffix in (".json", ".txt", ".safetensors", ".bin"):
        return False
    return _HUB_ID.fullmatch(str(path)) is not None and not owner.exists()


def get_hub_id(directory: Path) -> str | None:
    """Return the hub id of a directory in the hub's cache (…/models--OWNER--NAME/snapshots/…)."""
    parts = directory.parts
    if len(parts) < 3 or parts[-2] != "snapshots" or not parts[-3].startswith("models--"):
        return None
    return parts[-3].removeprefix("models--").replace("--", "/", 1)


def download_from_hub(
    name: str,
    *,
    endpoint: str | None = None,
    cache_dir: Path | None = None,
) -> Path:
    """Download a model from the hub, unless it is cached, and return the local directory.

    Token, cache and offline mode are those of ``huggingface_hub``.

    Args:
        name: OWNER/NAME or OWNER/NAME@REVISION.
        endpoint: Overrides the URL of the hub.
        cache_dir: Overrides the cache directory.

    Raises:
        ModelError: The download failed, or the repository holds no BERT weights.
    """
    # Imported here because it takes 0.1 s and most models are local.
    from huggingface_hub import snapshot_download

    match = _HUB_ID.fullmatch(name)
    if match is None:
        raise ModelError(f"{name!r}: expected OWNER/NAME or OWNER/NAME@REVISION")
    directory = Path()
    try:
        # Pickled weights are downloaded only if there are no safetensors.
        for weight_pattern in _WEIGHT_PATTERNS:
            directory = Path(
                snapshot_download(
                    match["id"],
                    revision=match["revision"],
                    endpoint=endpoint,
                    cache_dir=cache_dir,
                    allow_patterns=[*_METADATA_PATTERNS, weight_pattern],
                ),
            )
            if find_weights_file(directory) is not None:
                break
    except Exception as error:  # noqa: BLE001 - reported below
        # Errors of the HTTP library, the hub library and the disk have no common base class.
        reason = _describe_download_error(error)
        raise ModelError(f"{name}: no such file or directory here, and {reason}") from None
    if not (directory / CONFIG_FILE).is_file() or find_weights_file(directory) is None:
        raise ModelError(
            f"{name}: the hub repository has no {CONFIG_FILE} with {WEIGHTS_FILE} or {PICKLE_FILE}",
        )
    return directory


def _describe_download_error(error: Exception) -> str:
    """Return one line on why a download failed."""
    kind = type(error).__name__
    reasons = {
        "RepositoryNotFoundError": "the hub has no such model, or it is private",
        "RevisionNotFoundError": "the hub's model has no such revision",
        "GatedRepoError": "the hub's model is gated and needs approved access",
    }
    if kind in reasons:
        return f"{reasons[kind]}; check the name, or log in with: hf auth login"
    first_line = str(error).strip().splitlines()[0] if str(error).strip() else kind
    return (
        "the hub cannot be reached and the local cache is incomplete "
        f"({kind}: {first_line}); check the network, or HF_HUB_OFFLINE"
    )
