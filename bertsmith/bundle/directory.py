"""From what a user names to a model directory on this machine: a path, a RUN or a hub id.

It never opens a weight, and asks a hub only about a name that cannot be meant for this machine.
"""

import re
import shlex
from pathlib import Path
from typing import Final

from bertsmith.bundle.config import CONFIG_FILE
from bertsmith.errors import ModelError

#: The forms of weights, the preferred one first: one file or an index of several, and the old form.
WEIGHTS_FILE, OLD_WEIGHTS = "model.safetensors", "pytorch_model.bin"
INDEX_FILE, PICKLE_INDEX_FILE = f"{WEIGHTS_FILE}.index.json", f"{OLD_WEIGHTS}.index.json"
WEIGHT_FILES: Final = (WEIGHTS_FILE, INDEX_FILE, OLD_WEIGHTS, PICKLE_INDEX_FILE)
#: OWNER/NAME, and after an @ a branch, a tag or a commit.
_HUB_ID: Final = re.compile(r"(?P<id>\w[\w.-]*/[\w.-]+)(?:@(?P<revision>[\w./-]+))?", re.ASCII)
#: What a model needs beside its weights. Pictures, other frameworks' weights and so on stay there.
_SMALL: Final = ("*.json", "vocab.txt", "README.md", "*_Dense/model.safetensors")
_LARGE: Final = ("model*.safetensors", "pytorch_model*.bin")


def locate_model(model: Path | str) -> Path:
    """Return the directory of a model, fetched from the hub if it is named by a hub id.

    ``model``: the directory itself, a RUN with one inside, a file of the directory, or OWNER/NAME
    on the hub, such as "google-bert/bert-base-uncased", with "@" and a revision if need be. In a
    directory of sentence-transformers it may be the folder of the Transformer.
    Raises ModelError.
    """
    path = Path(model)
    here = path.parent if path.name in (CONFIG_FILE, *WEIGHT_FILES) and path.is_file() else path
    for directory in (here, here / "model", here / "0_Transformer"):
        if (directory / CONFIG_FILE).is_file() and find_weights_file(directory) is not None:
            return directory
    if is_hub_id(path):
        return download_from_hub(str(path))
    if not path.exists():
        raise ModelError(
            f"{path}: no such file or directory; expected a model directory, a RUN, or a model of "
            "the hub by its owner and name, such as google-bert/bert-base-uncased"
        )
    if (path / "checkpoints").is_dir():
        raise ModelError(
            f"{path}: this run has not written its model yet; give the same command again to "
            f"finish it, or write the model of its last checkpoint: bertsmith export "
            f"{shlex.quote(str(path))} --to hf --out DIR"
        )
    raise ModelError(
        f"{path}: not a model directory (no {CONFIG_FILE} with {WEIGHTS_FILE} in it) and not a RUN"
    )


def is_unfinished_run(path: Path) -> bool:
    """Tell whether a path is a run that has checkpoints but no model yet."""
    return (
        (path / "settings.toml").is_file()
        and any((path / "checkpoints").glob("step-*"))
        and not (path / "model").exists()
    )


def locate_tokenizer(place: Path) -> Path:
    """Return where the tokenizer stands that a path names: a RUN's or a hub id's is its model's.

    Raises ModelError for a RUN without a model and for a hub id that gives nothing; any other path
    is returned as it is, for the tokenizer's own reader to tell what is there.
    """
    run = place.is_dir() and any((place / part).is_dir() for part in ("model", "checkpoints"))
    return locate_model(place) if run or is_hub_id(place) else place


def pin_model_path(model: Path | str) -> Path:
    """Return ``model`` as an absolute path that means the same tomorrow.

    A hub id becomes the directory of the commit that it stands for now, in the hub's cache.
    """
    path = Path(model)
    return locate_model(path) if is_hub_id(path) else path.resolve()


def find_weights_file(directory: Path) -> str | None:
    """Return the name of the file that a directory's weights are read by, None without any."""
    return next((name for name in WEIGHT_FILES if (directory / name).is_file()), None)


def is_hub_id(path: Path) -> bool:
    """Tell whether a path can only be a hub id: its form is, and neither it nor its folder is here.

    So a slip in a file's name is never sent over the network, nor is one in a RUN's: what is called
    as the parts of a model are is none.
    """
    owner = Path(path.parts[0]) if path.parts else path
    if path.name == "model" or path.suffix in (".json", ".txt", ".safetensors", ".bin"):
        return False
    return _HUB_ID.fullmatch(str(path)) is not None and not owner.exists()


def hub_id_of(directory: Path) -> str | None:
    """Return the hub id of a directory in the hub's cache (…/models--OWNER--NAME/snapshots/…)."""
    parts = directory.parts
    if len(parts) < 3 or parts[-2] != "snapshots" or not parts[-3].startswith("models--"):
        return None
    return parts[-3].removeprefix("models--").replace("--", "/", 1)


def download_from_hub(
    name: str, *, endpoint: str | None = None, cache_dir: Path | None = None
) -> Path:
    """Return the local copy of a model on the hub; what is there already is not fetched again.

    ``name``: OWNER/NAME or OWNER/NAME@REVISION. Token, cache and offline mode are those of
    ``huggingface_hub``. ``endpoint`` and ``cache_dir`` stand in for its own. Raises ModelError.
    """
    # A tenth of a second, for those who name a model of the hub only.
    from huggingface_hub import snapshot_download

    match = _HUB_ID.fullmatch(name)
    if match is None:
        raise ModelError(f"{name!r}: expected OWNER/NAME or OWNER/NAME@REVISION")
    directory = Path()
    try:
        # The old form is fetched only where there is no other.
        for weights in _LARGE:
            directory = Path(
                snapshot_download(
                    match["id"],
                    revision=match["revision"],
                    endpoint=endpoint,
                    cache_dir=cache_dir,
                    allow_patterns=[*_SMALL, weights],
                )
            )
            if find_weights_file(directory) is not None:
                break
    except Exception as error:  # noqa: BLE001 - said below
        # Its HTTP library, its own errors and the disk's have no base in common.
        raise ModelError(f"{name}: no such file or directory here, and {_why(error)}") from None
    if not (directory / CONFIG_FILE).is_file() or find_weights_file(directory) is None:
        raise ModelError(
            f"{name}: the hub has this, but no {CONFIG_FILE} with {WEIGHTS_FILE} or {OLD_WEIGHTS} in it"
        )
    return directory


def _why(error: Exception) -> str:
    """Say in one line why a hub gave nothing."""
    kind = type(error).__name__
    known = {
        "RepositoryNotFoundError": "the hub has no such model, or it is private",
        "RevisionNotFoundError": "the hub's model has no such revision",
        "GatedRepoError": "the hub's model is given only to those who asked",
    }
    if kind in known:
        return f"{known[kind]}; check the name, or log in with: hf auth login"
    first = str(error).strip().splitlines()[0] if str(error).strip() else kind
    return (
        f"the hub could not be asked, nor is all of it in the local cache ({kind}: {first}); "
        "check the network, or HF_HUB_OFFLINE"
    )
