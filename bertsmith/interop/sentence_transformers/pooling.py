"""Reading of the pooling config in a sentence-transformers directory.

Only known types of modules are read. Code that a file refers to is not executed.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Final, Literal, get_args

from torch import Tensor

from bertsmith.bundle import StoredTensor, list_tensors
from bertsmith.bundle.config import read_json
from bertsmith.bundle.directory import MODULES_FILE, SENTENCE_TRANSFORMERS_CONFIG
from bertsmith.bundle.tensor_files import FLOAT_DTYPES
from bertsmith.errors import ModelError
from bertsmith.files import parse_json
from bertsmith.model.bert import BertModel
from bertsmith.model.config import PoolingMode
from bertsmith.model.sentence_embedding import BertForSentenceEmbedding, DenseLayer
from bertsmith.text.tokenizer_files import TOKENIZER_CONFIG_FILE
from bertsmith.text.wordpiece import Tokenizer

#: Config file of the Transformer module.
TRANSFORMER_CONFIG: Final = "sentence_bert_config.json"
#: Config file of each module after the Transformer module.
MODULE_CONFIG: Final = "config.json"
#: Type of the second module of a sparse model.
SPLADE_POOLING: Final = "SpladePooling"
#: Types of the first module; older sparse models have an MLMTransformer.
_TRANSFORMER_TYPES: Final = ("Transformer", "MLMTransformer")

Activation = Literal["Identity", "Tanh", "ReLU", "GELU", "Sigmoid"]
#: Names of the prompts of queries and documents, in the order in which they are looked for.
QUERY_PROMPT_NAMES: Final = ("query",)
DOCUMENT_PROMPT_NAMES: Final = ("document", "passage", "corpus")
#: The boolean keys for pooling modes in files of older releases, and the mode of each. Older
#: releases concatenate the pooled vectors in this order.
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
    """A linear layer after pooling.

    Attributes:
        weight: float32 [out, in].
        bias: float32 [out], or None.
        activation: Activation function of the output.
    """

    weight: Tensor
    bias: Tensor | None
    activation: Activation


@dataclass(frozen=True, kw_only=True)
class PoolingConfig:
    """Settings for combining the hidden states of a text into one vector.

    Attributes:
        modes: Pooling modes. The pooled vectors of all modes, each of width D, are concatenated.
        post_modules: Modules after pooling, in order.
        max_seq_length: Number of tokens to which texts are truncated, including [CLS] and [SEP];
            None for the model's maximum.
        lowercase: Whether text is lowercased before tokenization.
        prompts: Prefixes of texts by name, such as "query" and "document".
        default_prompt_name: Name of the prompt that is added to each text unless another one is
            selected; None for no prompt.
        matryoshka_dims: Numbers of first dimensions that were trained to be used alone.
        truncate_dim: Number of first dimensions that vectors keep after all modules, also after
            normalization; None for all.
        similarity: How other libraries compare the vectors, such as "cosine" or "dot".
    """

    modes: tuple[PoolingMode, ...] = ("mean",)
    post_modules: tuple[Dense | Literal["normalize"], ...] = ()
    max_seq_length: int | None = None
    lowercase: bool = False
    prompts: Mapping[str, str] = field(default_factory=dict)
    default_prompt_name: str | None = None
    matryoshka_dims: tuple[int, ...] = ()
    truncate_dim: int | None = None
    similarity: str = "cosine"

    @property
    def prompt(self) -> str:
        """The default prompt; "" if there is none."""
        return self.get_prompt(self.default_prompt_name)

    @property
    def is_normalized(self) -> bool:
        """Whether vectors have length 1 before they are truncated."""
        return self.post_modules[-1:] == ("normalize",)

    @property
    def modules_before_normalize(self) -> tuple[Dense | Literal["normalize"], ...]:
        """The modules without the final normalization, if there is one."""
        return self.post_modules[:-1] if self.is_normalized else self.post_modules

    @property
    def query_prompt_name(self) -> str | None:
        """Name of the prompt of queries: "query", or else the default prompt."""
        return self._find_prompt_name(QUERY_PROMPT_NAMES)

    @property
    def document_prompt_name(self) -> str | None:
        """Name of the prompt of documents: "document" or a synonym, or else the default prompt."""
        return self._find_prompt_name(DOCUMENT_PROMPT_NAMES)

    def _find_prompt_name(self, names: Sequence[str]) -> str | None:
        return next((name for name in names if name in self.prompts), self.default_prompt_name)

    def get_prompt(self, name: str | None) -> str:
        """Return the prompt with this name; "" for None."""
        return "" if name is None else self.prompts[name]

    def prepare_texts(self, texts: Sequence[str], tokenizer: Tokenizer) -> list[str]:
        """Prepend the default prompt to texts, and lowercase them unless the tokenizer does it."""
        return self.lowercase_texts([self.prompt + text for text in texts], tokenizer)

    def lowercase_texts(self, texts: Sequence[str], tokenizer: Tokenizer) -> list[str]:
        """Lowercase texts if the model requires it and the tokenizer does not do it."""
        if not self.lowercase or tokenizer.lowercase:
            return list(texts)
        # Hugging Face tokenizers lowercase each character separately, unlike str.lower(), which has
        # a special rule for a sigma at the end of a word.
        return ["".join(character.lower() for character in text) for text in texts]

    def restore_offsets(
        self, text: str, offsets: Sequence[tuple[int, int]], tokenizer: Tokenizer
    ) -> list[tuple[int, int]]:
        """Convert offsets in a result of ``prepare_texts`` to offsets in the text.

        Args:
            text: The text without the prompt.
            offsets: Ranges [start, end) of characters of the prepared text.
            tokenizer: The tokenizer.

        Returns:
            The ranges of characters of the text, empty for the prompt.
        """
        prompt_length = len(self.prompt)
        source = self.prompt + text
        if len(self.lowercase_texts([source], tokenizer)[0]) != len(source):
            # "İ" becomes two characters. Map each lowercased character to its source.
            lengths = (len(character.lower()) for character in source)
            indices = [index for index, length in enumerate(lengths) for _ in range(length)]
            offsets = [
                (indices[start], indices[end - 1] + 1) if start < end else (start, end)
                for start, end in offsets
            ]
        return [
            (max(start - prompt_length, 0), max(end - prompt_length, 0)) for start, end in offsets
        ]

    def output_width(self, hidden_width: int) -> int:
        """Return the width of the vectors before they are truncated.

        Args:
            hidden_width: Width of the encoder's hidden states.

        Raises:
            ModelError: A module's input width is not the output width of the previous module.
        """
        width = hidden_width * len(self.modes)
        for module in self.post_modules:
            if isinstance(module, Dense):
                if module.weight.shape[1] != width:
                    raise ModelError(
                        f"the Dense module expects vectors of width {module.weight.shape[1]}, but "
                        f"pooling ({', '.join(self.modes)}) and the previous modules return width "
                        f"{width}; use the pooling with which the model was trained"
                    )
                width = module.weight.shape[0]
        return width


def build_embedding_model(bert: BertModel, pooling: PoolingConfig) -> BertForSentenceEmbedding:
    """Return an encoder with pooling and copies of the modules after it."""
    post_modules: list[DenseLayer | Literal["normalize"]] = [
        module
        if isinstance(module, str)
        else DenseLayer(module.weight, module.bias, module.activation)
        for module in pooling.post_modules
    ]
    return BertForSentenceEmbedding(bert, pooling.modes, post_modules)


def read_pooling(directory: Path) -> PoolingConfig | None:
    """Read the pooling config in a model directory or in its parent directory.

    Returns:
        The pooling config; None if this is not a sentence-transformers directory, or one of a
        sparse model, see ``read_splade``.

    Raises:
        ModelError: A file cannot be read, or a module is not supported.
    """
    root = find_root(directory)
    if root is None:
        return None
    transformer, pooling, *later_modules = read_modules(root)
    _, transformer_folder = transformer
    pooling_type, pooling_folder = pooling
    if pooling_type == SPLADE_POOLING:
        return None
    if pooling_type != "Pooling":
        raise ModelError(
            f"{root / MODULES_FILE}: expected Pooling after Transformer, found {pooling_type}"
        )
    modes, includes_prompt = _read_modes(pooling_folder)
    config = read_model_config(root)
    if any(config.prompts.values()) and not includes_prompt:
        raise ModelError(
            f"{pooling_folder / MODULE_CONFIG}: pooling without the prompt (include_prompt: false) "
            "is not supported"
        )
    max_seq_length, lowercase = read_transformer_config(transformer_folder)
    return replace(
        config,
        modes=modes,
        post_modules=_read_post_modules(root, later_modules),
        max_seq_length=max_seq_length,
        lowercase=lowercase,
    )


def _read_post_modules(
    root: Path, modules: Sequence[tuple[str, Path]]
) -> tuple[Dense | Literal["normalize"], ...]:
    """Read the modules after pooling; ``modules`` contains the type and the folder of each."""
    post_modules: list[Dense | Literal["normalize"]] = []
    for module_type, folder in modules:
        if module_type == "Dense":
            post_modules.append(_read_dense(folder))
        elif module_type == "Normalize":
            post_modules.append("normalize")
        # Dropout has no effect outside training.
        elif module_type != "Dropout":
            raise ModelError(
                f"{root / MODULES_FILE}: module {module_type} is not supported; supported are "
                "Transformer, Pooling, Dense, Normalize and Dropout"
            )
    return tuple(post_modules)


def find_root(directory: Path) -> Path | None:
    """Return the folder with the modules.json of an embedding model; None if there is none.

    This is ``directory``, or its parent if ``directory`` is the folder of the Transformer module.
    """
    if (directory / MODULES_FILE).is_file():
        return None if _is_cross_encoder(directory) else directory
    directory = directory.resolve()
    if not (directory.parent / MODULES_FILE).is_file() or _is_cross_encoder(directory.parent):
        return None
    _, transformer_folder = read_modules(directory.parent)[0]
    return directory.parent if transformer_folder == directory else None


def describe_dropped_modules(directory: Path) -> list[str]:
    """Return a list with a note that a copy in another format has no modules; empty without any."""
    if find_root(directory) is None:
        return []
    note = (
        "the new directory has no modules of sentence-transformers: pooling, prompts and the "
        "maximum length of the original model are not written"
    )
    return [note]


def _is_cross_encoder(root: Path) -> bool:
    """Return whether this is a CrossEncoder, for which recent releases write modules.json too."""
    path = root / SENTENCE_TRANSFORMERS_CONFIG
    return path.is_file() and read_json(path).get("model_type") == "CrossEncoder"


def read_modules(root: Path) -> list[tuple[str, Path]]:
    """Return the type and the folder of each module, after checking that Transformer is first."""
    path = root / MODULES_FILE
    try:
        entries = parse_json(path.read_text(encoding="utf-8"))
        names = [(str(entry["type"]).rpartition(".")[2], str(entry["path"])) for entry in entries]
    except (OSError, ValueError, TypeError, KeyError) as error:
        raise ModelError(
            f"{path}: not a readable list of modules: {error!r}; download the model again"
        ) from None
    resolved_root = root.resolve()
    modules = [(module_type, (resolved_root / name).resolve()) for module_type, name in names]
    for module_type, folder in modules:
        if not folder.is_relative_to(resolved_root):
            raise ModelError(
                f"{path}: the folder of the module {module_type} is outside {root}; use another "
                "model"
            )
    if len(modules) < 2 or modules[0][0] not in _TRANSFORMER_TYPES:
        module_types = ", ".join(module_type for module_type, _ in modules) or "nothing"
        raise ModelError(f"{path}: expected Transformer and Pooling, found {module_types}")
    return modules


def _read_modes(folder: Path) -> tuple[tuple[PoolingMode, ...], bool]:
    """Return the pooling modes, and whether pooling includes the tokens of the prompt."""
    raw = read_json(folder / MODULE_CONFIG)
    value = raw.get("pooling_mode")
    if value is None:
        value = [mode for key, mode in POOLING_MODE_KEYS.items() if raw.get(key)]
        value = value or ["mean"]
    modes: list[Any] = value if isinstance(value, list) and value else [value]
    for mode in modes:
        if mode not in get_args(PoolingMode):
            supported = ", ".join(get_args(PoolingMode))
            raise ModelError(
                f"{folder / MODULE_CONFIG}: pooling {mode!r} is not supported; supported: "
                f"{supported}"
            )
    return tuple(modes), bool(raw.get("include_prompt", True))


def read_transformer_config(folder: Path) -> tuple[int | None, bool]:
    """Return the maximum length in tokens, and whether text is lowercased before tokenization."""
    path = folder / TRANSFORMER_CONFIG
    raw = read_json(path) if path.is_file() else {}
    output = raw.get("module_output_name", "token_embeddings")
    if output != "token_embeddings":
        raise ModelError(f"{path}: module_output_name is {output!r}; expected token_embeddings")
    max_seq_length = raw.get("max_seq_length")
    tokenizer_config = folder / TOKENIZER_CONFIG_FILE
    if max_seq_length is None and tokenizer_config.is_file():
        max_seq_length = read_json(tokenizer_config).get("model_max_length")
    if max_seq_length is None:
        return None, bool(raw.get("do_lower_case"))
    is_number = isinstance(max_seq_length, int | float) and math.isfinite(max_seq_length)
    if not is_number or max_seq_length < 2:
        raise ModelError(f"{path}: max_seq_length is {max_seq_length!r}; expected 2 or more")
    return int(max_seq_length), bool(raw.get("do_lower_case"))


def read_model_config(root: Path) -> PoolingConfig:
    """Return a pooling config with the prompts and dimensions in ``config_sentence_transformers``.

    Only Bertsmith writes the Matryoshka dimensions to this file.
    """
    path = root / SENTENCE_TRANSFORMERS_CONFIG
    raw = read_json(path) if path.is_file() else {}
    name = raw.get("default_prompt_name")
    prompts = raw.get("prompts") or {}
    if not isinstance(prompts, dict) or not all(isinstance(text, str) for text in prompts.values()):
        raise ModelError(f"{path}: prompts is {prompts!r}; expected an object of texts")
    if name is not None and name not in tuple(prompts):
        raise ModelError(
            f"{path}: the default prompt {name!r} is not in the list of prompts; add it there"
        )
    dims = raw.get("matryoshka_dims") or ()
    is_valid = isinstance(dims, list | tuple) and all(type(dim) is int and dim > 0 for dim in dims)
    if not is_valid:
        raise ModelError(f"{path}: matryoshka_dims is {dims!r}; expected positive integers")
    truncate_dim = raw.get("truncate_dim")
    if truncate_dim is not None and (type(truncate_dim) is not int or truncate_dim < 1):
        raise ModelError(f"{path}: truncate_dim is {truncate_dim!r}; expected a positive integer")
    return PoolingConfig(
        prompts=prompts,
        default_prompt_name=name,
        matryoshka_dims=tuple(dims),
        truncate_dim=truncate_dim,
        similarity=str(raw.get("similarity_fn_name") or "cosine"),
    )


def _read_dense(folder: Path) -> Dense:
    """Read the config and the weights of a Dense module."""
    raw = read_json(folder / MODULE_CONFIG)
    supported_values = {
        "use_residual": False,
        "module_input_name": "sentence_embedding",
        "module_output_name": "sentence_embedding",
    }
    for key, value in supported_values.items():
        if raw.get(key, value) not in (value, None):
            raise ModelError(
                f"{folder / MODULE_CONFIG}: {key} is {raw[key]!r}; only {value!r} is supported"
            )
    activation: Any = str(raw.get("activation_function", "Tanh")).rpartition(".")[2]
    if activation not in get_args(Activation):
        supported = ", ".join(get_args(Activation))
        raise ModelError(
            f"{folder / MODULE_CONFIG}: activation {activation!r} is not supported; supported: "
            f"{supported}"
        )
    shape = (raw.get("out_features"), raw.get("in_features"))
    tensors = list_tensors(folder)
    weight = _load_tensor(tensors, folder, "linear.weight", shape)
    has_bias = raw.get("bias", True)
    bias = _load_tensor(tensors, folder, "linear.bias", shape[:1]) if has_bias else None
    return Dense(weight, bias, activation)


def _load_tensor(
    tensors: Mapping[str, StoredTensor], folder: Path, name: str, shape: tuple[Any, ...]
) -> Tensor:
    """Return a tensor as float32 after checking its shape and dtype."""
    stored = tensors.get(name)
    if stored is None:
        raise ModelError(f"{folder}: the tensor {name!r} is missing; download the model again")
    if stored.shape != shape or stored.dtype not in FLOAT_DTYPES:
        raise ModelError(
            f"{stored.file}: {name} has dtype {stored.dtype} and shape {stored.shape}; expected "
            f"floats of shape {shape}, as in {MODULE_CONFIG}; download the model again"
        )
    return stored.load().float()
