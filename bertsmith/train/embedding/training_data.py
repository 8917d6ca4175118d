"""Reads and checks the training and held-out examples of an embedding model."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import numpy as np

from bertsmith.errors import RunError, SettingsError, TaskError
from bertsmith.files import name_paths
from bertsmith.interop.sentence_transformers import PoolingConfig
from bertsmith.plurals import count_noun
from bertsmith.tasks.beir import find_qrels, is_beir_folder, read_retrieval_set
from bertsmith.tasks.embedding_columns import resolve_columns
from bertsmith.tasks.embedding_data import (
    EmbeddingExamples,
    TextPrompts,
    TokenizeTexts,
    describe_kind,
    read_examples,
)
from bertsmith.tasks.embedding_settings import (
    LOSSES,
    LOSSES_USING_SETTING,
    EmbeddingSettings,
    TextColumns,
    check_loss_settings,
)
from bertsmith.tasks.inputs import ExampleCounts
from bertsmith.text.wordpiece import Tokenizer
from bertsmith.train.embedding.evaluation import HeldoutTexts

#: Splits of a validation folder in BEIR's format, in the order in which they are looked for.
HELDOUT_SPLITS: Final = ("dev", "validation", "test")


@dataclass(frozen=True)
class EmbeddingData:
    """The examples of a run.

    Attributes:
        train: Training examples.
        heldout: Held-out examples by name.
        counts: For each file, how many examples were read and skipped.
    """

    train: EmbeddingExamples
    heldout: dict[str, HeldoutTexts]
    counts: dict[str, ExampleCounts]


def build_tokenize_function(tokenizer: Tokenizer, pooling: PoolingConfig) -> TokenizeTexts:
    """Return a function that tokenizes texts that include their prompts, as at inference."""
    assert pooling.max_seq_length is not None
    max_text_tokens = pooling.max_seq_length - 2

    def tokenize(texts: Sequence[str], counts: ExampleCounts) -> list[list[int]]:
        counting_tokenizer = tokenizer.with_counter(counts.token_counts)
        encoded = counting_tokenizer.encode_batch(pooling.lowercase_texts(texts, tokenizer))
        counts.num_truncated += sum(len(ids) > max_text_tokens for ids in encoded)
        return [[tokenizer.cls_id, *ids[:max_text_tokens], tokenizer.sep_id] for ids in encoded]

    return tokenize


def get_text_prompts(pooling: PoolingConfig) -> TextPrompts:
    """Return the prompts that a model adds to texts, queries and documents."""
    return TextPrompts(
        pooling.prompt,
        pooling.get_prompt(pooling.query_prompt_name),
        pooling.get_prompt(pooling.document_prompt_name),
    )


def read_data(
    settings: EmbeddingSettings, tokenize: TokenizeTexts, pooling: PoolingConfig
) -> EmbeddingData:
    """Read the training and held-out examples, and check that they suit the loss.

    Args:
        settings: Files, columns and loss.
        tokenize: Tokenizes texts that include their prompts.
        pooling: Has the prompts, and the number of dimensions that vectors keep.

    Raises:
        TaskError: If a file has invalid or too few examples.
        SettingsError: If the loss does not suit the examples.
    """
    paths = [Path(file) for file in settings.train_files]
    train, train_counts = read_examples(
        paths, settings, tokenize, settings.columns, prompts=get_text_prompts(pooling)
    )
    settings = resolve_loss(settings, train)
    _check_prompts(settings, train)
    names = ["train"] if len(paths) == 1 else [f"train {name}" for name in name_paths(paths)]
    counts = dict(zip(names, train_counts, strict=True))
    heldout: dict[str, HeldoutTexts] = {}
    if settings.validation_files:
        train_columns = resolve_columns(paths[0], settings, settings.columns)
        for name, file in settings.validation_files.items():
            heldout[name], counts[name] = read_heldout_file(
                Path(file), settings, tokenize, train_columns, pooling
            )
    else:
        train, heldout_examples = hold_out_examples(train, settings)
        heldout["heldout"] = HeldoutTexts(
            heldout_examples.drop_unused_texts(), settings, pooling.truncate_dim
        )
    check_examples(train, settings)
    return EmbeddingData(train, heldout, counts)


def read_heldout_file(
    path: Path,
    settings: EmbeddingSettings,
    tokenize: TokenizeTexts,
    train_columns: TextColumns,
    pooling: PoolingConfig,
) -> tuple[HeldoutTexts, ExampleCounts]:
    """Read a validation table or a folder in BEIR's format, and return its counts."""
    prompts = get_text_prompts(pooling)
    if is_beir_folder(path):
        qrels = find_qrels(path, HELDOUT_SPLITS)
        retrieval, counts = read_retrieval_set(path, qrels, tokenize, prompts)
        return HeldoutTexts(retrieval, settings, pooling.truncate_dim), counts
    examples, file_counts = read_examples(
        [path],
        settings,
        tokenize,
        settings.validation_columns,
        train_columns,
        prompts,
        keep_duplicate_scores=True,
    )
    return HeldoutTexts(examples, settings, pooling.truncate_dim), file_counts[0]


def resolve_loss(settings: EmbeddingSettings, examples: EmbeddingExamples) -> EmbeddingSettings:
    """Return the settings with the default loss of the kind of examples, if none is set.

    Raises:
        SettingsError: If the loss does not suit the examples, or a setting belongs to another loss.
    """
    losses = LOSSES[examples.kind]
    if settings.loss is None:
        settings = settings.model_copy(update={"loss": losses[0]})
    if settings.loss not in losses:
        raise SettingsError(
            f"embedding.loss is {settings.loss!r}, but the examples are "
            f"{describe_kind(examples.kind)}; use {' or '.join(losses)}"
        )
    check_loss_settings(settings, LOSSES_USING_SETTING)
    return settings


def _check_prompts(settings: EmbeddingSettings, examples: EmbeddingExamples) -> None:
    """Raise SettingsError if the examples have no queries and documents with separate prompts."""
    for name in ("query_prompt", "document_prompt"):
        if examples.kind != "pairs" and getattr(settings, name) is not None:
            raise SettingsError(
                f"embedding.{name} needs pairs of a query and a document, but the examples are "
                f"{describe_kind(examples.kind)}; use embedding.prompt (--prompt)"
            )


def hold_out_examples(
    examples: EmbeddingExamples, settings: EmbeddingSettings
) -> tuple[EmbeddingExamples, EmbeddingExamples]:
    """Split the examples into training and held-out examples.

    Examples with the same anchor stay together, so the examples of the first anchor may exceed
    ``max_validation_examples``. The split does not depend on ``run.seed``.

    Raises:
        RunError: If all examples have the same anchor.
    """
    anchors, anchor_rows, anchor_counts = np.unique(
        examples.anchors, return_inverse=True, return_counts=True
    )
    if len(anchors) == 1:
        raise RunError(
            f"{', '.join(settings.train_files)}: all examples have the same first text, so none "
            "can be held out; give a validation file with --dev"
        )
    order = np.random.default_rng(0).permutation(len(anchors))
    total_counts = np.cumsum(anchor_counts[order])
    num_held_out = min(
        round(settings.validation_fraction * len(anchors)),
        int(np.searchsorted(total_counts, settings.max_validation_examples, side="right")),
        len(anchors) - 1,
    )
    is_held_out = np.isin(anchor_rows, order[: max(1, num_held_out)])
    train_indices, heldout_indices = np.flatnonzero(~is_held_out), np.flatnonzero(is_held_out)
    return examples.select(train_indices), examples.select(heldout_indices)


def check_examples(examples: EmbeddingExamples, settings: EmbeddingSettings) -> None:
    """Check that the loss can learn from the training examples.

    Raises:
        TaskError: If the examples have no contrast: one score, one class, or no negatives.
    """
    files = ", ".join(settings.train_files)
    if examples.kind == "scored_pairs":
        _check_scores(examples, settings, files)
    if examples.kind == "labeled_texts":
        sizes = np.bincount(examples.labels)
        if np.count_nonzero(sizes) < 2:
            raise TaskError(f"{files}: all texts have the same label; expected at least two labels")
        if sizes.max() < 2:
            raise TaskError(f"{files}: no label has two texts; expected labels that texts share")
    if settings.loss == "triplet" and examples.kind == "pairs":
        num_missing = int((np.diff(examples.negative_offsets) == 0).sum())
        if num_missing:
            raise TaskError(
                f"{files}: the triplet loss needs negatives, but {num_missing:,} of "
                f"{count_noun(len(examples), 'pair')} have none; name their column with "
                "--negatives, remove these pairs, or use the loss mnrl"
            )
    if len(examples) < 2:
        raise TaskError(f"{files}: there is 1 training example; expected at least two")


def _check_scores(examples: EmbeddingExamples, settings: EmbeddingSettings, files: str) -> None:
    """Raise TaskError if all scores are equal, or are not cosine similarities for that loss."""
    lowest, highest = float(examples.scores.min()), float(examples.scores.max())
    if lowest == highest:
        raise TaskError(
            f"{files}: every score is {lowest:g}; expected at least two different scores"
        )
    largest = max(-lowest, highest)
    if settings.loss == "cosine" and largest > settings.max_score:
        raise TaskError(
            f"{files}: the scores are {lowest:g} to {highest:g}, but the cosine loss needs "
            f"-{settings.max_score:g} to {settings.max_score:g}; give the score of equal meaning "
            f"with --set embedding.max_score={highest:g}"
        )


def list_hashed_files(settings: EmbeddingSettings) -> list[Path]:
    """Return all data files, and the files of a folder in BEIR's format that are read."""
    files: list[Path] = []
    for path in settings.list_files():
        if path.is_dir() and is_beir_folder(path):
            texts = [*path.glob("corpus.jsonl*"), *path.glob("queries.jsonl*")]
            files += [*sorted(texts), find_qrels(path, HELDOUT_SPLITS)]
        else:
            files.append(path)
    return files
