"""Loading of the model that training starts from, and saving of the trained model."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Final, Literal

import torch

from bertsmith.bundle import EncoderBundle, load, load_encoder
from bertsmith.bundle.model_card import EMBEDDING, build_model_card
from bertsmith.errors import SettingsError
from bertsmith.interop.sentence_transformers import (
    DOCUMENT_PROMPT_NAMES,
    QUERY_PROMPT_NAMES,
    Dense,
    PoolingConfig,
    build_embedding_model,
    check_is_expressible,
    resolve_pooling,
    save_sentence_transformers,
)
from bertsmith.model.denoising_decoder import DenoisingDecoder
from bertsmith.model.sentence_embedding import BertForSentenceEmbedding, DenseLayer
from bertsmith.tasks.embedding_settings import (
    BOUNDED_MARGIN,
    DEFAULT_MAX_SEQLEN,
    UNBOUNDED_MARGIN,
    EmbeddingSettings,
)

#: Seed of the initialization of the decoder.
_DECODER_SEED: Final = 0
#: Maximum cosine distance, and maximum Euclidean distance of normalized vectors.
_MAX_BOUNDED_DISTANCE: Final = 2


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
    if settings.max_seqlen is not None:
        encoder.config.check_max_seqlen("embedding.max_seqlen", settings.max_seqlen)
    max_seqlen = settings.max_seqlen or pooling.max_seq_length
    max_seqlen = max_seqlen or min(DEFAULT_MAX_SEQLEN, max_positions)
    pooling = replace(
        pooling,
        # All losses compare vectors by their cosine.
        similarity="cosine",
        max_seq_length=min(max_seqlen, max_positions),
        # Dimensions of earlier training are lost if this training has none.
        matryoshka_dims=tuple(settings.matryoshka_dims),
    )
    pooling = _replace_prompts(pooling, settings)
    width = pooling.output_width(encoder.config.width)
    _check_matryoshka_dims(settings.matryoshka_dims, width)
    model = build_embedding_model(encoder.model, pooling)
    if settings.loss == "tsdae":
        model.decoder = _build_decoder(encoder, width)
    return EmbeddingBundle(encoder, pooling, model)


def _check_matryoshka_dims(dims: Sequence[int], width: int) -> None:
    """Raise SettingsError if vectors of this width lack a dimension, or some are not trained."""
    if not dims:
        return
    largest = max(dims)
    if largest > width:
        raise SettingsError(
            f"embedding.matryoshka_dims has {largest}, but vectors have {width} dimensions; give "
            "at most that many"
        )
    if largest < width:
        raise SettingsError(
            f"embedding.matryoshka_dims is {list(dims)}, but vectors have {width} dimensions, so "
            f"those after the first {largest} would not be trained; add {width}"
        )


def resolve_triplet_margin(
    settings: EmbeddingSettings, pooling: PoolingConfig
) -> EmbeddingSettings:
    """Return the settings with the default margin of the triplet loss, if none is set.

    Args:
        settings: Loss, distance, margin and Matryoshka dimensions, whose vectors are normalized.
        pooling: Specifies whether the vectors of the model are normalized.

    Raises:
        SettingsError: If no distances can differ by more than the margin.
    """
    if settings.loss != "triplet":
        return settings
    is_normalized = pooling.is_normalized or bool(settings.matryoshka_dims)
    is_bounded = settings.triplet_distance == "cosine" or is_normalized
    margin = settings.triplet_margin
    if margin is None:
        margin = BOUNDED_MARGIN if is_bounded else UNBOUNDED_MARGIN
    elif is_bounded and margin >= _MAX_BOUNDED_DISTANCE:
        distance = "the Euclidean distance of normalized vectors"
        if settings.triplet_distance == "cosine":
            distance = "the cosine distance"
        raise SettingsError(
            f"embedding.triplet_margin is {margin:g}, but {distance} is at most "
            f"{_MAX_BOUNDED_DISTANCE}, so no triplet can exceed the margin; give less, such as "
            f"{BOUNDED_MARGIN:g}"
        )
    return settings.model_copy(update={"triplet_margin": margin})


def _build_decoder(encoder: EncoderBundle, vector_width: int) -> DenoisingDecoder:
    """Return the decoder of TSDAE; it has the masked-LM head of the start model, or a new one."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(_DECODER_SEED)
        mlm = load(encoder.path).model.mlm
        mlm.decoder.weight = encoder.model.embeddings.words.weight
        return DenoisingDecoder(encoder.config, vector_width, mlm)


def _replace_prompts(pooling: PoolingConfig, settings: EmbeddingSettings) -> PoolingConfig:
    """Return a pooling config with the prompts of the settings.

    If there are prompts, those of queries and documents are always included, because
    ``encode_query`` and ``encode_document`` of sentence-transformers ignore the default prompt.
    """
    if settings.prompt is not None:
        names = {*QUERY_PROMPT_NAMES, *DOCUMENT_PROMPT_NAMES}
        prompts = {name: text for name, text in pooling.prompts.items() if name not in names}
        prompts["default"] = settings.prompt
        pooling = replace(pooling, prompts=prompts, default_prompt_name="default")
    query_prompt, document_prompt = settings.query_prompt, settings.document_prompt
    if query_prompt is None:
        query_prompt = pooling.get_prompt(pooling.query_prompt_name)
    if document_prompt is None:
        document_prompt = pooling.get_prompt(pooling.document_prompt_name)
    if not query_prompt and not document_prompt and not pooling.prompts:
        return pooling
    prompts = {**pooling.prompts, "query": query_prompt, "document": document_prompt}
    return replace(pooling, prompts=prompts)


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
    model_card = build_model_card(encoder.config, encoder.tokenizer, info, EMBEDDING)
    save_sentence_transformers(directory, encoder, pooling, info, model_card)
