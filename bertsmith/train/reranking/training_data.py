"""Reads and checks the training and held-out examples of a reranker."""

from dataclasses import dataclass
from pathlib import Path

import numpy as np

from bertsmith.errors import RunError, SettingsError, TaskError
from bertsmith.files import name_paths
from bertsmith.plurals import count_noun
from bertsmith.tasks.embedding_data import Ints
from bertsmith.tasks.embedding_settings import check_loss_settings
from bertsmith.tasks.inputs import ExampleCounts
from bertsmith.tasks.reranking_data import (
    RerankingExamples,
    read_reranking_examples,
    resolve_reranking_columns,
)
from bertsmith.tasks.reranking_settings import (
    DEFAULT_RANDOM_NEGATIVES,
    LOSSES_USING_SETTING,
    RerankingSettings,
)
from bertsmith.text.wordpiece import Tokenizer
from bertsmith.train.reranking.batches import add_heldout_negatives, find_usable_queries
from bertsmith.train.reranking.evaluation import HeldoutQueries, build_heldout_queries


@dataclass(frozen=True)
class RerankingData:
    """The examples of a run.

    Attributes:
        settings: The settings, with the number of random negatives.
        train: Training examples; each query has a term in the loss.
        negatives: The documents that can be drawn as random negatives: those of all training
            queries, also of queries without a term in the loss.
        heldout: Held-out queries by name.
        counts: For each file, how many examples were read and skipped.
    """

    settings: RerankingSettings
    train: RerankingExamples
    negatives: Ints
    heldout: dict[str, HeldoutQueries]
    counts: dict[str, ExampleCounts]


def read_data(settings: RerankingSettings, tokenizer: Tokenizer) -> RerankingData:
    """Read the training and held-out examples, and check that they suit the loss.

    Args:
        settings: The settings; ``max_seqlen`` is set.
        tokenizer: Tokenizes texts.

    Raises:
        TaskError: If a file has invalid or unsuitable examples.
        SettingsError: If a setting does not suit the examples.
    """
    max_seqlen = settings.max_seqlen
    assert max_seqlen is not None
    paths = [Path(file) for file in settings.train_files]
    train, train_counts = read_reranking_examples(
        paths, settings, tokenizer, max_seqlen, settings.columns
    )
    check_loss_settings(settings, LOSSES_USING_SETTING)
    settings = _resolve_negatives(settings, train)
    _check_scores(train, settings)
    names = ["train"] if len(paths) == 1 else [f"train {name}" for name in name_paths(paths)]
    counts = dict(zip(names, train_counts, strict=True))
    heldout: dict[str, HeldoutQueries] = {}
    if settings.validation_files:
        train_columns = resolve_reranking_columns(paths[0], settings, settings.columns)
        for name, file in settings.validation_files.items():
            examples, file_counts = read_reranking_examples(
                [Path(file)],
                settings,
                tokenizer,
                max_seqlen,
                settings.validation_columns,
                train_columns,
            )
            examples = _add_contrast(examples, examples.documents, settings)
            heldout[name] = build_heldout_queries(examples, settings.relevance_threshold, file)
            counts[name] = file_counts[0]
    else:
        train, heldout["heldout"] = _hold_out(train, settings)
    negatives = train.documents
    train = _select_usable_queries(train, settings, counts[names[0]])
    return RerankingData(settings, train, negatives, heldout, counts)


def _resolve_negatives(
    settings: RerankingSettings, examples: RerankingExamples
) -> RerankingSettings:
    """Return the settings with the number of random negatives.

    Raises:
        SettingsError: If random negatives, whose score is 0, do not suit the scores.
    """
    if settings.random_negatives is None:
        is_relevant = examples.is_relevant(settings.relevance_threshold)
        count = DEFAULT_RANDOM_NEGATIVES if is_relevant.all() else 0
        return settings.model_copy(update={"random_negatives": count})
    lowest = float(examples.scores.min())
    if settings.random_negatives and lowest < 0:
        raise SettingsError(
            f"reranking.random_negatives is {settings.random_negatives}, but the lowest score is "
            f"{lowest:g}, less than the 0 of random negatives; set random_negatives to 0, or add "
            "a constant to the scores"
        )
    return settings


def _check_scores(examples: RerankingExamples, settings: RerankingSettings) -> None:
    """Check that the scores suit the loss.

    Raises:
        TaskError: If all scores are equal, no document is relevant, or the scores are not in the
            range of the loss ``bce``.
    """
    files = ", ".join(settings.train_files)
    lowest, highest = float(examples.scores.min()), float(examples.scores.max())
    if settings.loss == "bce" and (lowest < 0 or highest > settings.max_score):
        advice = "use the loss ranknet, margin_mse or listnet"
        if lowest >= 0:
            advice = f"give the highest score with --set reranking.max_score={highest:g}"
        raise TaskError(
            f"{files}: the scores are {lowest:g} to {highest:g}, but the loss bce needs 0 to "
            f"{settings.max_score:g}; {advice}"
        )
    if not settings.random_negatives and lowest == highest:
        raise TaskError(
            f"{files}: every document has the score {lowest:g}; expected documents with different "
            "scores, or relevant documents only (--set reranking.random_negatives=4 adds others)"
        )
    uses_relevance = settings.loss == "mnrl" or settings.random_negatives
    if uses_relevance and not examples.is_relevant(settings.relevance_threshold).any():
        raise TaskError(
            f"{files}: no document is relevant: the highest score is {highest:g}, not above "
            f"reranking.relevance_threshold ({settings.relevance_threshold:g}); correct the scores "
            "or lower the threshold"
        )


def _select_usable_queries(
    examples: RerankingExamples, settings: RerankingSettings, counts: ExampleCounts
) -> RerankingExamples:
    """Return the queries that have a term in the loss, and add a note about the others.

    Raises:
        TaskError: If there is no such query.
    """
    usable = find_usable_queries(examples, settings)
    needed = "documents with different scores"
    if settings.loss == "mnrl":
        needed = "a relevant and another document"
    if not len(usable):
        raise TaskError(
            f"{', '.join(settings.train_files)}: no query has {needed}, which the loss "
            f"{settings.loss} needs; use the loss bce, or add random documents with --set "
            "reranking.random_negatives=4"
        )
    num_unusable = len(examples) - len(usable)
    if num_unusable:
        counts.notes.append(
            f"{count_noun(num_unusable, 'training query', 'training queries')} without {needed}: "
            f"not used by the loss {settings.loss}"
        )
    return examples.select(usable) if num_unusable else examples


def _hold_out(
    examples: RerankingExamples, settings: RerankingSettings
) -> tuple[RerankingExamples, HeldoutQueries]:
    """Return the training queries, and held-out queries with a metric."""
    train, heldout = hold_out_queries(examples, settings)
    heldout_queries = build_heldout_queries(
        _add_contrast(heldout, examples.documents, settings),
        settings.relevance_threshold,
        f"the queries held out from {', '.join(settings.train_files)}",
        "give a validation file with --dev, with relevant and other documents",
    )
    return train, heldout_queries


def _add_contrast(
    examples: RerankingExamples, documents: Ints, settings: RerankingSettings
) -> RerankingExamples:
    """Return held-out queries; if their documents have no contrast, others are added.

    Relevant documents with different scores have a contrast, unless random documents are added in
    training too.

    Args:
        examples: The held-out queries.
        documents: The documents that can be added.
        settings: Relevance threshold and random negatives.
    """
    has_equal_scores = examples.scores.min() == examples.scores.max()
    if examples.is_relevant(settings.relevance_threshold).all() and (
        has_equal_scores or settings.random_negatives
    ):
        return add_heldout_negatives(examples, documents)
    return examples


def hold_out_queries(
    examples: RerankingExamples, settings: RerankingSettings
) -> tuple[RerankingExamples, RerankingExamples]:
    """Split the queries into training and held-out queries.

    The split does not depend on ``run.seed``.

    Raises:
        RunError: If there are fewer than two queries.
    """
    if len(examples) < 2:
        raise RunError(
            f"{', '.join(settings.train_files)}: there is 1 query, so none can be held out; give a "
            "validation file with --dev"
        )
    order = np.random.default_rng(0).permutation(len(examples))
    num_held_out = max(1, round(settings.validation_fraction * len(examples)))
    num_held_out = min(num_held_out, settings.max_validation_queries, len(examples) - 1)
    heldout, train = np.sort(order[:num_held_out]), np.sort(order[num_held_out:])
    return examples.select(train), examples.select(heldout)
