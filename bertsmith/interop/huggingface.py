"""Model directories for others: a copy in the plainest form, and sent to a hub by its own client.

It never sends what does not fit together, and keeps no token: the client has its own place for it.
"""

from dataclasses import dataclass
from pathlib import Path
from typing import Final

from bertsmith.bundle import CONFIG_FILE, load_model, locate_model, open_weights, save_model
from bertsmith.bundle.metadata import read_metadata
from bertsmith.errors import ModelError
from bertsmith.files import check_new_directory

#: What of a model directory goes to the hub: files of other purposes may lie beside them.
_SENT: Final = (
    "README.md", "config.json", "bertsmith.json", "tokenizer.json", "tokenizer_config.json",
    "vocab.txt", "special_tokens_map.json", "model*.safetensors", "model.safetensors.index.json",
    "modules.json", "sentence_bert_config.json", "config_sentence_transformers.json",
    "*/config.json", "*/model.safetensors",
)  # fmt: skip


@dataclass(frozen=True)
class Pushed:
    """What was sent. url: of the model on the hub; commit: the hash of the new commit."""

    url: str
    commit: str
    files: tuple[str, ...]


def is_model_directory(source: str) -> bool:
    """Tell whether a name is a model directory's, or a hub id; a TensorFlow release is neither."""
    path = Path(source)
    if not path.exists():
        return "/" in source and not path.parent.exists()
    return path.is_dir() and (path / CONFIG_FILE).is_file()


def write_huggingface(model: Path | str, out: Path | str) -> list[str]:
    """Write a model, of whatever files and names, as a model directory with one safetensors file.

    ``out`` must not be there, or be empty. Returns what a user should know. Raises ModelError.
    """
    out = Path(out)
    check_new_directory(out)
    bundle = load_model(model)
    save_model(out, bundle)
    if bundle.config.norm != "post" or bundle.config.attention == "causal":
        return ["transformers has no such BERT: it refuses the directory (model_type bertsmith)"]
    return []


def push_to_hub(
    model: Path | str,
    repo_id: str,
    *,
    private: bool = False,
    revision: str | None = None,
    endpoint: str | None = None,
    token: str | None = None,
) -> Pushed:
    """Send a model directory to the hub in one commit, into a repository made if need be.

    repo_id: OWNER/NAME. private: of a new repository; one that is there stays as it is. revision: a
    branch, made if need be. endpoint, token: instead of those that ``huggingface_hub`` finds.
    Raises ModelError.
    """
    # A tenth of a second, for those who push only.
    from huggingface_hub import CommitOperationAdd, HfApi

    directory = locate_model(model)
    _, config, _ = read_metadata(directory)
    open_weights(directory, config)
    files = _files(directory)
    hub = HfApi(endpoint=endpoint, token=token)
    try:
        url = hub.create_repo(repo_id, private=private or None, exist_ok=True)
        if revision is not None:
            hub.create_branch(repo_id, branch=revision, exist_ok=True)
        done = hub.create_commit(
            repo_id,
            [CommitOperationAdd(file, directory / file) for file in files],
            commit_message="Add the model",
            revision=revision,
        )
    except Exception as error:  # noqa: BLE001 - said below
        # Its HTTP library, its own errors and the disk's have no base in common.
        first = (str(error).strip().splitlines() or [""])[0]
        raise ModelError(
            f"{repo_id}: could not be sent ({type(error).__name__}: {first}); check the name and "
            "the network, and log in with: hf auth login"
        ) from None
    return Pushed(str(url), str(done.oid), files)


def _files(directory: Path) -> tuple[str, ...]:
    """Return the files of a model directory that are sent, by their places in it."""
    if not list(directory.glob("model*.safetensors")):
        raise ModelError(f"{directory}: only weights in safetensors are sent, and there are none")
    found = {file.relative_to(directory).as_posix()
             for pattern in _SENT for file in directory.glob(pattern)}  # fmt: skip
    return tuple(sorted(found))
