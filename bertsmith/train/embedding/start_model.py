"""Loading of the model that training starts from, and saving of the trained model."""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Final, Literal

from bertsmith.bundle import EncoderBundle, load_encoder
from bertsmith.bundle.model_card import build_model_card
from bertsmith.errors import SettingsError
from bertsmith.interop.sentence_transformers import (
    Dense,
    PoolingConfig,
    build_embedding_model,
    check_is_expressible,
    resolve_pooling,
    save_sentence_transformers,
)
from bertsmith.model.sentence_embedding import BertForSentenceEmbedding, DenseLayer
from bertsmith.tasks.embedding_settings import EmbeddingSettings

#: Default maximum number of tokens of a text, if the start model does not specify one.
_DEFAULT_MAX_SEQLEN: Final = 128


@dataclass(frozen=True)
class EmbeddingBundle:
    """An embedding model in memory.

    Attributes:
        encoder: The encoder, its tokenizer and its directory.
        pooling: Pooling, the modules after it, prompt and maximum length.
        model: The encoder with pooling; it shares its weights with ``encoder``.
    """

    encoder: EncoderBundle
    pooling: PoolingConfig
    model: BertForSentenceEmbedding


def load_start_model(
    path: Path, settings: EmbeddingSettings, model_overrides: Mapping[str, Any]
) -> EmbeddingBundle:
    """Load any BERT, or a sentence-transformers directory, as an embedding model.

    Args:
        path: The model directory.
        settings: Pooling, normalization, prompt and maximum length.
        model_overrides: ``ModelConfig`` fields to replace, such as dropout.

    Raises:
        ModelError: The model cannot be loaded, or not be written for sentence-transformers.
        SettingsError: The model does not support a setting.
    """
    encoder = load_encoder(path, config_overrides=model_overrides)
    check_is_expressible(encoder)
    pooling = resolve_pooling(encoder.path, settings.pooling, settings.normalize)
    max_positions = encoder.config.max_positions
    max_seqlen = settings.max_seqlen or pooling.max_seq_length
    max_seqlen = max_seqlen or min(_DEFAULT_MAX_SEQLEN, max_positions)
    if settings.max_seqlen is not None and max_seqlen > max_positions:
        raise SettingsError(
            f"embedding.max_seqlen is {max_seqlen}, but the model takes at most {max_positions} "
            "tokens; reduce embedding.max_seqlen"
        )
    pooling = replace(
        pooling,
        max_seq_length=min(max_seqlen, max_positions),
        matryoshka_dims=tuple(settings.matryoshka_dims) or pooling.matryoshka_dims,
    )
    if settings.prompt is not None:
        prompts = {**pooling.prompts, "default": settings.prompt}
        pooling = replace(pooling, prompts=prompts, default_prompt_name="default")
    width = pooling.output_width(encoder.config.width)
    for dim in settings.matryoshka_dims:
        if dim > width:
            raise SettingsError(
                f"embedding.matryoshka_dims has {dim}, but vectors have {width} dimensions; give "
                "at most that many"
            )
    model = build_embedding_model(encoder.model, pooling)
    return EmbeddingBundle(encoder, pooling, model)


def save_embedder(directory: Path, bundle: EmbeddingBundle, info: Mapping[str, Any]) -> None:
    """Write a model as a sentence-transformers directory.

    BERT's pooler is not written, because it is not trained.

    Args:
        directory: The directory to write; an existing one is replaced.
        bundle: The model.
        info: Content of bertsmith.json, such as provenance.
    """
    layers = iter(bundle.model.dense)
    post_modules: list[Dense | Literal["normalize"]] = []
    for module in bundle.pooling.post_modules:
        if isinstance(module, str):
            post_modules.append(module)
            continue
        layer = next(layers)
        assert isinstance(layer, DenseLayer)
        bias = None if layer.bias is None else layer.bias.detach().cpu()
        post_modules.append(Dense(layer.weight.detach().cpu(), bias, module.activation))
    pooling = replace(bundle.pooling, post_modules=tuple(post_modules))
    encoder = bundle.encoder
    model_card = build_model_card(encoder.config, encoder.tokenizer, info, "embedding")
    save_sentence_transformers(directory, encoder, pooling, info, model_card=model_card)
