"""Log messages about the examples of the files of a fine-tuning run."""

from collections.abc import Mapping

from bertsmith.plurals import count_noun
from bertsmith.progress import Progress
from bertsmith.tasks.inputs import ExampleCounts


def format_heldout_sizes(sizes: Mapping[str, int], singular: str, plural: str) -> str:
    """Return the size of each held-out split, such as "16 held-out examples".

    Args:
        sizes: Number of examples by the name of the split.
        singular: What one example is called.
        plural: What several examples are called.
    """
    if len(sizes) == 1:
        [size] = sizes.values()
        return count_noun(size, f"held-out {singular}", f"held-out {plural}")
    return f"held-out {plural}: " + ", ".join(f"{size:,} ({name})" for name, size in sizes.items())


def log_counts(progress: Progress, counts: Mapping[str, ExampleCounts]) -> None:
    """Log how many examples of each file were skipped or truncated, and warn about [UNK].

    Args:
        progress: Receives the messages.
        counts: Counts by the name of the file; empty if no file was read.
    """
    for name, file_counts in counts.items():
        _log_file_counts(progress, name, file_counts)
    if counts:
        _warn_unknown_tokens(progress, counts)


def _log_file_counts(progress: Progress, name: str, counts: ExampleCounts) -> None:
    """Log how many examples of a file were skipped or truncated, and other notes on the file."""
    parts = []
    for reason, number in counts.skipped.items():
        location = counts.first_skipped.get(reason)
        suffix = f" (first: {location})" if reason in counts.first_skipped else ""
        parts.append(f"{number:,} skipped: {reason}{suffix}")
    if counts.num_truncated:
        parts.append(f"{counts.num_truncated:,} truncated")
    if counts.num_unreachable_answers:
        parts.append(
            f"{count_noun(counts.num_unreachable_answers, 'answer')} in no window, trained as no "
            "answer (raise task.max_seqlen, or lower task.window_stride)"
        )
    if counts.num_without_target:
        parts.append(
            f"{count_noun(counts.num_without_target, 'input')} without a target, not trained on"
        )
    if parts:
        num_read = count_noun(counts.num_read, "example")
        progress.log(f"{name}: {num_read} read; {'; '.join(parts)}")
    for note in counts.notes:
        progress.log(note)
    if counts.unseen_labels:
        progress.log(
            f"{name}: no example has the label "
            f"{', '.join(map(repr, counts.unseen_labels))}, so the model cannot learn it"
        )


def _warn_unknown_tokens(progress: Progress, counts: Mapping[str, ExampleCounts]) -> None:
    """Log a warning about the file with the highest fraction of [UNK], if the fraction is high."""
    name = max(counts, key=lambda name: counts[name].token_counts.unknown_share)
    warning = counts[name].token_counts.format_warning(f"the tokens of {name}")
    if warning is not None:
        progress.log(warning)
