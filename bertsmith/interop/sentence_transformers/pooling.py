"""What a directory of sentence-transformers says beside its encoder: how vectors come of texts.

It never runs any of it, and executes nothing that a file names.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, Literal, get_args

from torch import Tensor

from bertsmith.bundle import StoredTensor, list_tensors
from bertsmith.bundle.config import read_json
from bertsmith.bundle.tensor_files import FLOAT_DTYPES
from bertsmith.errors import ModelError
from bertsmith.files import parse_json
from bertsmith.text.tokenizer_files import TOKENIZER_CONFIG_FILE

MODULES_FILE: Final = "modules.json"
#: Files of the Transformer's folder, of the whole, and of each other module.
TRANSFORMER_CONFIG: Final = "sentence_bert_config.json"
MODEL_CONFIG: Final = "config_sentence_transformers.json"
MODULE_CONFIG: Final = "config.json"

PoolingMode = Literal["cls", "max", "mean", "mean_sqrt_len_tokens", "weightedmean", "lasttoken"]
Activation = Literal["Identity", "Tanh", "ReLU", "GELU", "Sigmoid"]
#: The older way to say a mode: a key each, in the order in which their vectors are joined.
POOLING_MODE_KEYS: Final[dict[str, PoolingMode]] = {
    "pooling_mode_cls_token": "cls",
    "pooling_mode_max_tokens": "max",
    "pooling_mode_mean_tokens": "mean",
    "pooling_mode_mean_sqrt_len_tokens": "mean_sqrt_len_tokens",
    "pooling_mode_weightedmean_tokens": "weightedmean",
    "pooling_mode_lasttoken": "lasttoken",
}


@dataclass(frozen=True)
class Dense:
    """A Linear after pooling. weight: float32 [out, in]; bias: float32 [out] or None."""

    weight: Tensor
    bias: Tensor | None
    activation: Activation


@dataclass(frozen=True, kw_only=True)
class PoolingConfig:
    """How the hidden states of a text become one vector.

    modes: each gives a vector of width D, which are joined. after: what follows, in its order.
    max_seq_length: tokens of a text that are read, [CLS] and [SEP] counted; None: all that the model
    takes. lowercase: whether text is lowered before the tokenizer sees it. prompt: what stands
    before every text.
    """

    modes: tuple[PoolingMode, ...] = ("mean",)
    post_modules: tuple[Dense | Literal["normalize"], ...] = ()
    max_seq_length: int | None = None
    lowercase: bool = False
    prompt: str = ""

    def output_width(self, hidden: int) -> int:
        """Return the width of the vectors of an encoder of width ``hidden``.

        Raises ModelError where one step does not fit the one before.
        """
        width = hidden * len(self.modes)
        for own in self.post_modules:
            if isinstance(own, Dense):
                if own.weight.shape[1] != width:
                    raise ModelError(
                        f"Dense takes vectors of width {own.weight.shape[1]}, but pooling "
                        f"({', '.join(self.modes)}) and what follows give {width}"
                    )
                width = own.weight.shape[0]
        return width


def read_pooling(directory: Path) -> PoolingConfig | None:
    """Read what stands in, or around, a model directory; None if it is not one of theirs.

    Raises ModelError for a file that cannot be read, or a module that is not known here.
    """
    root = _root(directory)
    if root is None:
        return None
    (_, folder), (kind, place), *rest = _modules(root)
    if kind != "Pooling":
        raise ModelError(f"{root / MODULES_FILE}: expected Pooling after Transformer, found {kind}")
    modes, prompted = _modes(place)
    prompt = _prompt(root)
    if prompt and not prompted:
        raise ModelError(
            f"{place / MODULE_CONFIG}: the prompt is left out of pooling (include_prompt), which "
            "is not known here"
        )
    longest, lowercase = _limits(folder)
    after: list[Dense | Literal["normalize"]] = []
    for kind, place in rest:
        if kind == "Dense":
            after.append(_dense(place))
        elif kind == "Normalize":
            after.append("normalize")
        # Dropout does nothing outside training.
        elif kind != "Dropout":
            raise ModelError(
                f"{root / MODULES_FILE}: the module {kind} is not known here; known are Transformer, "
                "Pooling, Dense, Normalize and Dropout"
            )
    return PoolingConfig(
        modes=modes,
        post_modules=tuple(after),
        max_seq_length=longest,
        lowercase=lowercase,
        prompt=prompt,
    )


def _root(directory: Path) -> Path | None:
    """Return the folder of modules.json: the model's own, or the one around its Transformer."""
    if (directory / MODULES_FILE).is_file():
        return directory
    around = directory.resolve().parent
    inside = (around / MODULES_FILE).is_file() and _modules(around)[0][1] == directory.resolve()
    return around if inside else None


def _modules(root: Path) -> list[tuple[str, Path]]:
    """Return the kind and the folder of each module, two or more, a Transformer first."""
    path = root / MODULES_FILE
    try:
        found = parse_json(path.read_text(encoding="utf-8"))
        listed = [(str(own["type"]).rpartition(".")[2], str(own["path"])) for own in found]
    except (OSError, ValueError, TypeError, KeyError) as error:
        raise ModelError(f"{path}: not a readable list of modules: {error!r}") from None
    top = root.resolve()
    modules = [(kind, (top / place).resolve()) for kind, place in listed]
    for kind, place in modules:
        if not place.is_relative_to(top):
            raise ModelError(f"{path}: the folder of {kind} is outside of {root}")
    if len(modules) < 2 or modules[0][0] != "Transformer":
        names = ", ".join(kind for kind, _ in modules)
        raise ModelError(f"{path}: expected Transformer and Pooling, found {names or 'nothing'}")
    return modules


def _modes(folder: Path) -> tuple[tuple[PoolingMode, ...], bool]:
    """Return the modes of pooling, and whether a prompt's tokens are pooled too."""
    raw = read_json(folder / MODULE_CONFIG)
    said = raw.get("pooling_mode")
    if said is None:
        said = [mode for key, mode in POOLING_MODE_KEYS.items() if raw.get(key)] or ["mean"]
    modes: list[Any] = [said] if isinstance(said, str) else list(said)
    for mode in modes:
        if mode not in get_args(PoolingMode):
            known = ", ".join(get_args(PoolingMode))
            raise ModelError(f"{folder / MODULE_CONFIG}: pooling {mode!r}; known here: {known}")
    return tuple(modes), bool(raw.get("include_prompt", True))


def _limits(folder: Path) -> tuple[int | None, bool]:
    """Return the longest text in tokens, and whether text is lowered first."""
    path = folder / TRANSFORMER_CONFIG
    raw = read_json(path) if path.is_file() else {}
    output = raw.get("module_output_name", "token_embeddings")
    if output != "token_embeddings":
        raise ModelError(f"{path}: the Transformer gives {output!r}; expected token_embeddings")
    longest = raw.get("max_seq_length")
    beside = folder / TOKENIZER_CONFIG_FILE
    if longest is None and beside.is_file():
        longest = read_json(beside).get("model_max_length")
    if longest is not None and (not isinstance(longest, int | float) or longest < 2):
        raise ModelError(f"{path}: the longest text is {longest!r} tokens; expected 2 or more")
    return None if longest is None else int(longest), bool(raw.get("do_lower_case"))


def _prompt(root: Path) -> str:
    """Return what stands before every text that is embedded without being asked for."""
    path = root / MODEL_CONFIG
    raw = read_json(path) if path.is_file() else {}
    name = raw.get("default_prompt_name")
    prompts = raw.get("prompts") or {}
    if name is not None and name not in prompts:
        raise ModelError(f"{path}: there is no prompt {name!r}, which is the default one")
    return "" if name is None else str(prompts[name])


def _dense(folder: Path) -> Dense:
    raw = read_json(folder / MODULE_CONFIG)
    own = {"use_residual": False, "module_input_name": "sentence_embedding",
           "module_output_name": "sentence_embedding"}  # fmt: skip
    for key, value in own.items():
        if raw.get(key, value) not in (value, None):
            raise ModelError(f"{folder / MODULE_CONFIG}: {key} is {raw[key]!r}; known: {value!r}")
    activation: Any = str(raw.get("activation_function", "Tanh")).rpartition(".")[2]
    if activation not in get_args(Activation):
        known = ", ".join(get_args(Activation))
        raise ModelError(f"{folder / MODULE_CONFIG}: activation {activation!r}; known: {known}")
    shape = (raw.get("out_features"), raw.get("in_features"))
    stored = list_tensors(folder)
    weight = _tensor(stored, folder, "linear.weight", shape)
    bias = _tensor(stored, folder, "linear.bias", shape[:1]) if raw.get("bias", True) else None
    return Dense(weight, bias, activation)


def _tensor(
    stored: Mapping[str, StoredTensor], folder: Path, name: str, shape: tuple[Any, ...]
) -> Tensor:
    own = stored.get(name)
    if own is None:
        raise ModelError(f"{folder}: the tensor {name!r} is missing")
    if own.shape != shape or own.dtype not in FLOAT_DTYPES:
        raise ModelError(
            f"{own.file}: {name} is {own.dtype} of shape {own.shape}; expected floats, and its "
            f"config says {shape}"
        )
    return own.load().float()
