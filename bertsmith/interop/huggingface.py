"""Export of model directories for transformers, and upload to the Hugging Face hub.

``huggingface_hub`` manages the access token; Bertsmith does not store it.
"""

from dataclasses import dataclass
from pathlib import Path
from typing import Final

import torch

from bertsmith.bundle import (
    CONFIG_FILE,
    WEIGHTS_FILE,
    PretrainedBundle,
    load_model,
    locate_model,
    open_weights,
    save_model,
)
from bertsmith.bundle.config import read_json
from bertsmith.bundle.directory import (
    MODULE_FOLDERS,
    MODULES_FILE,
    SENTENCE_TRANSFORMERS_CONFIG,
    is_reference_model,
    is_unfinished_run,
    list_candidate_directories,
)
from bertsmith.bundle.encoder import NO_POOLER_NOTE, load_pooler_weights, save_encoder
from bertsmith.bundle.metadata import read_metadata
from bertsmith.bundle.pretrained import describe_unused_rows
from bertsmith.bundle.weights import describe_names
from bertsmith.errors import ModelError, SettingsError
from bertsmith.files import check_new_directory
from bertsmith.interop.sentence_transformers.pooling import describe_dropped_modules, find_root
from bertsmith.text.segmenter import SEGMENTER_NOTE

#: Patterns of the files in a model directory that are uploaded.
_UPLOAD_PATTERNS: Final = (
    "README.md", "config.json", "bertsmith.json", "tokenizer.json", "tokenizer_config.json",
    "vocab.txt", "added_tokens.json", "special_tokens_map.json", "model*.safetensors",
    "model.safetensors.index.json", MODULES_FILE,
    "sentence_bert_config.json", SENTENCE_TRANSFORMERS_CONFIG,
    f"{MODULE_FOLDERS}/config.json", f"{MODULE_FOLDERS}/model.safetensors",
    # Files of `bertsmith lab release`, to which the model card refers.
    "curve.png", "settings.toml", "training.json", "results/panel.json",
)  # fmt: skip

#: Values of ``dtype``.
_DTYPES: Final = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}


@dataclass(frozen=True)
class UploadedModel:
    """A model that was uploaded to the hub.

    Attributes:
        url: URL of the model's page.
        commit: The hash of the new commit.
        files: The uploaded files, relative to the model directory.
    """

    url: str
    commit: str
    files: tuple[str, ...]


def is_model_directory(source: str) -> bool:
    """Return whether ``source`` is a model in Hugging Face's layout, not a TensorFlow release.

    Besides model directories, these are run directories, reference models and hub ids.
    """
    path = Path(source)
    if not path.exists():
        return is_reference_model(path) or ("/" in source and not path.parent.exists())
    has_config = any(
        (folder / CONFIG_FILE).is_file() for folder in list_candidate_directories(path)
    )
    return has_config or is_unfinished_run(path)


def write_huggingface(model: Path | str, out: Path | str, *, dtype: str = "fp32") -> list[str]:
    """Write a model directory with one safetensors file.

    A pre-trained model without a trained head is written as an encoder.

    Args:
        model: A model directory, run directory, reference model or hub id.
        out: A directory that is empty or does not exist.
        dtype: The dtype of the stored weights: "fp32", "bf16" or "fp16". Files of 16-bit weights
            have half the size. Loaded weights are converted to fp32, in transformers as well.

    Returns:
        Notes for the user.

    Raises:
        ModelError: The model cannot be read, has a next-sentence head but no masked-LM head, or
            ``out`` is not empty.
        SettingsError: ``dtype`` has another value.
    """
    if dtype not in _DTYPES:
        raise SettingsError(f"--dtype {dtype}: expected one of {', '.join(_DTYPES)}")
    out = Path(out)
    check_new_directory(out)
    bundle = load_model(model)
    has_mlm_head, has_nsp_head = (
        isinstance(bundle, PretrainedBundle) and bundle.has_head(prefix)
        for prefix in ("mlm.", "nsp.")
    )
    if has_nsp_head and not has_mlm_head:
        raise ModelError(
            f"{bundle.path}: a model with a next-sentence head but no masked-LM head cannot be "
            "exported; fine-tune it, or export it to sentence-transformers"
        )
    if isinstance(bundle, PretrainedBundle) and not has_mlm_head:
        notes = _write_encoder(bundle, out, _DTYPES[dtype])
    else:
        save_model(out, bundle, _DTYPES[dtype])
        notes = bundle.notes()
    notes += describe_dropped_modules(bundle.path)
    if bundle.tokenizer.segmenter is not None:
        notes.append(SEGMENTER_NOTE)
    if read_json(out / CONFIG_FILE)["model_type"] != "bert":
        notes.append(
            "transformers cannot load this model (its config has model_type bertsmith): "
            "transformers' BERT has no left-to-right attention, no pre-norm or batch norm, no ELU "
            "and no BiLSTM"
        )
    return notes


def _write_encoder(bundle: PretrainedBundle, out: Path, dtype: torch.dtype) -> list[str]:
    """Write the encoder, and the pooler if there is one, of a model without trained heads.

    Returns:
        Notes for the user.
    """
    pooler_weights = {}
    if not any(name.startswith("pooler.") for name in bundle.new_weights):
        pooler_weights = load_pooler_weights(bundle.path, bundle.config)
    info = {**bundle.info, "nsp": False}
    save_encoder(out, bundle.model.bert, bundle.tokenizer, info, dtype, pooler_weights)
    unused = [name for name in bundle.unused_weights if "pooler." not in name]
    notes = [
        "the model has no trained head: only the encoder is written",
        *describe_names(bundle.path, "unused weights", unused),
        *describe_unused_rows(bundle.path, bundle.config, bundle.tokenizer),
    ]
    return notes if pooler_weights else [*notes, NO_POOLER_NOTE]


def push_to_hub(
    model: Path | str,
    repo_id: str,
    *,
    private: bool = False,
    revision: str | None = None,
    endpoint: str | None = None,
    token: str | None = None,
) -> UploadedModel:
    """Upload a model directory to the hub in one commit.

    The repository is created if it does not exist.

    Args:
        model: A model directory or run directory.
        repo_id: OWNER/NAME.
        private: Whether a new repository is private. An existing repository is not changed.
        revision: Name of a branch, which is created if it does not exist; None for the main branch.
        endpoint: URL of the hub; None for the default of ``huggingface_hub``.
        token: Access token; None for the default of ``huggingface_hub``.

    Raises:
        ModelError: The model directory is incomplete, or the upload failed.
    """
    # Imported here because the import takes 0.1 s.
    from huggingface_hub import CommitOperationAdd, HfApi

    directory = locate_model(model)
    _, config, _ = read_metadata(directory)
    open_weights(directory, config)
    # The BERT of an older sentence-transformers directory is in one of its folders.
    root = find_root(directory) or directory
    files = _list_files(root, directory)
    hub = HfApi(endpoint=endpoint, token=token)
    try:
        # With None, the repository gets the default visibility of its owner.
        url = hub.create_repo(repo_id, private=private or None, exist_ok=True)
        if revision is not None:
            hub.create_branch(repo_id, branch=revision, exist_ok=True)
        commit = hub.create_commit(
            repo_id,
            [CommitOperationAdd(file, root / file) for file in files],
            commit_message="Add the model",
            revision=revision,
        )
    except Exception as error:  # noqa: BLE001 - the error is reported
        # Errors of the hub, its HTTP library and the file system have no common base class.
        first_line = str(error).strip().partition("\n")[0]
        raise ModelError(
            f"{repo_id}: the upload failed ({type(error).__name__}: {first_line}); check the name "
            "and the network connection, and log in with: hf auth login"
        ) from None
    return UploadedModel(str(url), str(commit.oid), files)


def _list_files(root: Path, directory: Path) -> tuple[str, ...]:
    """Return the sorted paths of the files to upload.

    Args:
        root: The directory to upload; the paths are relative to it.
        directory: The model directory: ``root`` or one of its folders.
    """
    if not list(directory.glob("model*.safetensors")):
        is_embedding_model = find_root(directory) is not None
        raise ModelError(
            f"{directory}: the model has no safetensors weights, and other weights are not "
            "uploaded; convert the model with: bertsmith export --to "
            f"{'sentence-transformers' if is_embedding_model else 'hf'}"
        )
    for folder in root.glob("*_Dense"):
        if not (folder / WEIGHTS_FILE).is_file():
            raise ModelError(
                f"{folder}: this module has no {WEIGHTS_FILE}, and other weights are not uploaded; "
                "convert the model with: bertsmith export --to sentence-transformers"
            )
    root = root.resolve()
    files = {
        file.relative_to(root).as_posix()
        for folder in (root, directory.resolve())
        for pattern in _UPLOAD_PATTERNS
        for file in folder.glob(pattern)
    }
    return tuple(sorted(files))
