"""Model directories: paths, runs, reference models, ids on the Hugging Face hub, file hashes."""

import hashlib
import re
import shlex
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Final

from bertsmith.bundle.config import CONFIG_FILE, read_json
from bertsmith.bundle.metadata import INFO_FILE
from bertsmith.errors import ModelError
from bertsmith.files import compute_file_sha256

WEIGHTS_FILE, PICKLE_FILE = "model.safetensors", "pytorch_model.bin"
INDEX_FILE, PICKLE_INDEX_FILE = f"{WEIGHTS_FILE}.index.json", f"{PICKLE_FILE}.index.json"
#: Names of weight files, in order of preference. An index lists the shards of sharded weights.
WEIGHT_FILES: Final = (WEIGHTS_FILE, INDEX_FILE, PICKLE_FILE, PICKLE_INDEX_FILE)
#: The OpenVINO graph of a model, where sentence-transformers looks for it.
OPENVINO_FILE: Final = "openvino/openvino_model.xml"
#: Key of bertsmith.json with the name of the model from which an OpenVINO graph was made.
OPENVINO_INFO_KEY: Final = "openvino"
#: Folder of the BERT in older sentence-transformers directories, the list of their modules, and the
#: config of the whole model.
TRANSFORMER_FOLDER: Final = "0_Transformer"
MODULES_FILE: Final = "modules.json"
SENTENCE_TRANSFORMERS_CONFIG: Final = "config_sentence_transformers.json"
#: Models that are distributed with Bertsmith, one folder each; in a clone, a link to models/.
REFERENCE_MODELS: Final = Path(__file__).parent.parent / "reference_models"
#: OWNER/NAME, optionally followed by @ and a branch, tag or commit.
_HUB_ID: Final = re.compile(r"(?P<id>\w[\w.-]*/[\w.-]+)(?:@(?P<revision>[\w./-]+))?", re.ASCII)
#: Files downloaded along with the weights, from any folder.
_METADATA_PATTERNS: Final = (
    "*.json", "README.md", "*_Dense/model.safetensors", "*_Dense/pytorch_model.bin",
)  # fmt: skip
#: Files downloaded from the folder of the BERT. A SentencePiece model shows that vocab.txt is not
#: the vocabulary of a WordPiece tokenizer.
_MODEL_PATTERNS: Final = (
    "vocab.txt", "spiece.model", "sentencepiece.bpe.model", "tokenizer*.model",
    "model*.safetensors",
)  # fmt: skip
_PICKLE_PATTERN: Final = "pytorch_model*.bin"
#: Pattern for the folders of sentence-transformers modules, such as 1_Pooling. Other folders, such
#: as the checkpoints of a trainer, are not part of the model.
MODULE_FOLDERS: Final = "[0-9]*_*"
#: Patterns for the configs and weights of sentence-transformers modules in folders.
_HASHED_MODULE_PATTERNS: Final = tuple(
    f"{MODULE_FOLDERS}/{name}" for name in (CONFIG_FILE, WEIGHTS_FILE, PICKLE_FILE)
)
#: Patterns for weights, configs and tokenizer files, also in the folders of sentence-transformers
#: models. README.md has no influence on the hash.
_HASHED_PATTERNS: Final = (
    "*.json",
    "vocab.txt",
    "model*.safetensors",
    "pytorch_model*.bin",
    *_HASHED_MODULE_PATTERNS,
)


def is_model_file(path: Path) -> bool:
    """Return whether this is a file by which a model directory can be named."""
    return path.name in (CONFIG_FILE, *WEIGHT_FILES) and path.is_file()


def list_candidate_directories(path: Path) -> tuple[Path, ...]:
    """Return the directories that may contain the model of a local path, see ``locate_model``."""
    root = path.parent if is_model_file(path) else path
    return root, root / "model", root / TRANSFORMER_FOLDER


def locate_model(model: Path | str) -> Path:
    """Return the directory of a model; models on the hub are downloaded.

    Args:
        model: A model directory, a run directory, a file in a model directory, the name of a
            reference model, or OWNER/NAME on the hub, such as "google-bert/bert-base-uncased",
            optionally with "@" and a revision. A sentence-transformers directory may contain the
            BERT in its folder 0_Transformer. A local path with the name of a reference model
            takes precedence.

    Raises:
        ModelError: There is no model at this path, or it cannot be downloaded.
    """
    path = Path(model)
    root, *_ = candidates = list_candidate_directories(path)
    for directory in candidates:
        if (directory / CONFIG_FILE).is_file() and find_weights_file(directory) is not None:
            return directory
    if find_openvino_model(path) is not None:
        raise ModelError(
            f"{root}: this directory has an OpenVINO graph and no weights, so it can only embed "
            f"texts; use {describe_original_model(root)}"
        )
    if is_reference_model(path):
        return REFERENCE_MODELS / path
    if is_hub_id(path):
        return download_from_hub(str(path))
    if not path.exists():
        names = list_reference_models()
        reference = f"the name of a reference model ({', '.join(names)}), " if names else ""
        raise ModelError(
            f"{path}: no such file or directory; expected a model directory, a run directory, "
            f"{reference}or a model on the hub as OWNER/NAME, such as google-bert/bert-base-uncased"
        )
    if (path / "checkpoints").is_dir():
        raise ModelError(
            f"{path}: this run has not written its model yet; repeat the run's command to finish "
            "it, or export its last checkpoint with: "
            f"bertsmith export {shlex.quote(str(path))} --to hf --out DIR",
        )
    raise ModelError(
        f"{path}: not a model directory (no {CONFIG_FILE} with {WEIGHTS_FILE} in it) and not a run "
        "directory",
    )


def find_openvino_model(model: Path | str) -> Path | None:
    """Return the directory of a model that has an OpenVINO graph and no weights, or else None.

    A directory with weights and a graph is loaded from its weights, as on machines without
    OpenVINO.

    Args:
        model: A model directory, or its config.json.
    """
    path = Path(model)
    directory = path.parent if path.name == CONFIG_FILE and path.is_file() else path
    has_graph = (directory / CONFIG_FILE).is_file() and (directory / OPENVINO_FILE).is_file()
    return directory if has_graph and find_weights_file(directory) is None else None


def describe_original_model(directory: Path) -> str:
    """Return "the original model" from which an OpenVINO graph was made, with its name if known."""
    path = directory / INFO_FILE
    source = read_json(path).get(OPENVINO_INFO_KEY) if path.is_file() else None
    name = source.get("source") if isinstance(source, dict) else None
    return "the original model" if name is None else f"the original model, {name}"


def locate_embedding_model(model: Path | str) -> Path:
    """Return the directory of a model that embeds texts.

    Args:
        model: A path or name as in ``locate_model``, or a directory with an OpenVINO graph.

    Raises:
        ModelError: There is no model at this path, or it cannot be downloaded.
    """
    return find_openvino_model(model) or locate_model(model)


def is_unfinished_run(path: Path) -> bool:
    """Return whether a path is a run directory with checkpoints but no model yet."""
    return (
        (path / "settings.toml").is_file()
        and any((path / "checkpoints").glob("step-*"))
        and not (path / "model").exists()
    )


def locate_tokenizer(path: Path) -> Path:
    """Return the path to read a tokenizer from.

    For a run directory, a reference model or a hub id, the model directory is returned. Any other
    path is returned unchanged, without checking that it contains a tokenizer.

    Raises:
        ModelError: The run has no model yet, or the hub model is not available.
    """
    is_run = path.is_dir() and any((path / name).is_dir() for name in ("model", "checkpoints"))
    return locate_model(path) if is_run or is_reference_model(path) or is_hub_id(path) else path


def pin_model_path(model: Path | str) -> Path:
    """Return an absolute path to a model.

    A model on the hub is downloaded, and the path of its current commit in the cache is returned.
    """
    path = Path(model)
    return locate_model(path) if is_reference_model(path) or is_hub_id(path) else path.resolve()


def list_reference_models() -> list[str]:
    """Return the sorted names of the models that are distributed with Bertsmith."""
    return sorted(file.parent.name for file in REFERENCE_MODELS.glob(f"*/{CONFIG_FILE}"))


def is_reference_model(path: Path) -> bool:
    """Return whether a path is the name of a reference model and not a local path."""
    return not path.exists() and str(path) in list_reference_models()


def find_weights_file(directory: Path) -> str | None:
    """Return the name of the preferred weight file in a directory; None if there is none."""
    for name in WEIGHT_FILES:
        if (directory / name).is_file():
            return name
    return None


def is_hub_id(path: Path) -> bool:
    """Return whether a path is a hub id and not a local path.

    A misspelled local path must not cause a network request. A path is therefore not a hub id if
    its first folder exists, if its suffix is that of a model file, or if its last part is "model",
    as in a run directory.
    """
    owner = Path(path.parts[0]) if path.parts else path
    if path.name == "model" or path.suffix in (".json", ".txt", ".safetensors", ".bin"):
        return False
    return _HUB_ID.fullmatch(str(path)) is not None and not owner.exists()


def get_model_name(directory: Path) -> str:
    """Return the hub id of a model, or the name of its folder; for RUN/model, the name of the run.

    Unlike the path of the model, the name can be published. The folder of a BERT in a
    sentence-transformers directory has the name of that directory.
    """
    has_parent_name = directory.name in ("model", TRANSFORMER_FOLDER)
    folder = directory.parent if has_parent_name else directory
    return get_hub_id(directory) or folder.name


def format_model_path(directory: Path) -> str:
    """Return the name of a model for messages: a reference model's name, a hub id, or its path.

    A path in the current directory is relative to it.
    """
    if directory.parent == REFERENCE_MODELS:
        return directory.name
    hub_id = get_hub_id(directory)
    if hub_id is not None:
        return hub_id
    current = Path.cwd()
    return str(directory.relative_to(current) if directory.is_relative_to(current) else directory)


def get_hub_id(directory: Path) -> str | None:
    """Return the hub id of a directory in the local cache of the hub; None for other directories.

    Directories in the cache have the form …/models--OWNER--NAME/snapshots/COMMIT. The model may be
    in their folder 0_Transformer.
    """
    root = directory.parent if directory.name == TRANSFORMER_FOLDER else directory
    parts = root.parts
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

    The environment variables of ``huggingface_hub`` for the token, the cache and the offline mode
    apply.

    Args:
        name: OWNER/NAME or OWNER/NAME@REVISION.
        endpoint: URL of the hub; None for the default of ``huggingface_hub``.
        cache_dir: Cache directory; None for the default of ``huggingface_hub``.

    Raises:
        ModelError: The download failed, or the repository contains no BERT weights.
    """
    # Imported here because the import takes 0.1 s and most models are local.
    from huggingface_hub import snapshot_download

    match = _HUB_ID.fullmatch(name)
    if match is None:
        raise ModelError(f"{name!r}: expected OWNER/NAME or OWNER/NAME@REVISION")
    download = partial(
        snapshot_download,
        match["id"],
        revision=match["revision"],
        endpoint=endpoint,
        cache_dir=cache_dir,
    )
    try:
        directory = _download_files(download)
    except Exception as error:  # noqa: BLE001 - the error is reported
        # Errors of the HTTP library, the hub library and the file system have no common base class.
        reason = _describe_download_error(error)
        raise ModelError(f"{name}: no such file or directory here, and {reason}") from None
    if not (directory / CONFIG_FILE).is_file() or find_weights_file(directory) is None:
        raise ModelError(
            f"{name}: this repository on the hub is not a model: it needs {CONFIG_FILE} and "
            f"{WEIGHTS_FILE} or {PICKLE_FILE}; use another repository",
        )
    return directory


def _download_files(download: Callable[..., str]) -> Path:
    """Download the files of a model, and return the local directory with its config.json.

    Args:
        download: ``snapshot_download`` for a repository; the patterns of the files are missing.
    """
    root = Path(download(allow_patterns=[*_METADATA_PATTERNS, *_MODEL_PATTERNS]))
    folder = root / TRANSFORMER_FOLDER
    prefix = ""
    if (folder / CONFIG_FILE).is_file() and not (root / CONFIG_FILE).is_file():
        prefix = f"{TRANSFORMER_FOLDER}/"
        download(allow_patterns=[f"{prefix}{pattern}" for pattern in _MODEL_PATTERNS])
    # Pickled weights are downloaded only if there are no safetensors. The index of sharded ones is
    # among the metadata.
    if find_weights_file(root / prefix) in (None, PICKLE_INDEX_FILE):
        download(allow_patterns=[f"{prefix}{_PICKLE_PATTERN}"])
    return root / prefix


def _describe_download_error(error: Exception) -> str:
    """Return the reason for a failed download and what to do about it, as one line."""
    error_name = type(error).__name__
    reasons = {
        "RepositoryNotFoundError": "the hub has no such model, or it is private",
        "RevisionNotFoundError": "the hub's model has no such revision",
        "GatedRepoError": "the hub's model is gated and needs approved access",
    }
    if error_name in reasons:
        return f"{reasons[error_name]}; check the name, or log in with: hf auth login"
    message = str(error).strip()
    first_line = message.splitlines()[0] if message else error_name
    return (
        "the hub cannot be reached and the local cache is incomplete "
        f"({error_name}: {first_line}); check the network connection and HF_HUB_OFFLINE"
    )


def hash_model_files(directory: Path) -> str:
    """Return the SHA-256 hash over the names and contents of a model's files, as hexadecimal.

    It detects changes to a model directory.
    """
    files = {file for pattern in _HASHED_PATTERNS for file in directory.glob(pattern)}
    if find_openvino_model(directory) is not None:
        graph_file = directory / OPENVINO_FILE
        files |= {graph_file, graph_file.with_suffix(".bin")}
    paths = {str(file.relative_to(directory)): file for file in sorted(files)}
    digest = hashlib.sha256()
    for name, file in (paths | _find_parent_files(directory)).items():
        digest.update(f"{name} {compute_file_sha256(file)}\n".encode())
    return digest.hexdigest()


def compute_model_id(model: Path | str) -> str:
    """Return the first 16 digits of the hash of a model's files, as ``run.start_id`` stores them.

    Args:
        model: Path or name of the model, as in ``locate_model``.

    Raises:
        ModelError: If there is no model.
    """
    return hash_model_files(locate_model(model))[:16]


def _find_parent_files(directory: Path) -> dict[str, Path]:
    """Return the files of the other modules by name, if the BERT is in the folder 0_Transformer."""
    folder = directory.resolve()
    root = folder.parent
    if folder.name != TRANSFORMER_FOLDER or not (root / MODULES_FILE).is_file():
        return {}
    patterns = ("*.json", *_HASHED_MODULE_PATTERNS)
    files = {file for pattern in patterns for file in root.glob(pattern)}
    return {f"../{file.relative_to(root)}": file for file in sorted(files) if file.parent != folder}
