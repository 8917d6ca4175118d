"""``bertsmith compare``: compare the config, weights and outputs of two models."""

import math
from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from bertsmith.cli.app import app, format_examples
from bertsmith.cli.console import print_json, print_line, print_table
from bertsmith.cli.model_options import (
    Device,
    check_device,
    check_readable,
    find_model,
    read_lines,
    resolve_device,
)
from bertsmith.plurals import count_noun

if TYPE_CHECKING:
    from bertsmith.use.inspection.compare import Comparison, Difference, VocabularyComparison

EXIT_DIFFERENT = 1
#: Maximum number of tensors to print, those with the largest difference first; --json prints all.
_MAX_TENSORS = 20
_VALUE_COLUMNS = ("", "A", "B")


@app.command(
    epilog=format_examples(
        "bertsmith compare my-run my-run-2",
        "bertsmith compare my-run exported-model --tolerance 0 --text sentences.txt",
    )
)
def compare(
    a: Annotated[
        Path,
        typer.Argument(
            metavar="A",
            help="A model directory, a run directory, the name of a reference model or a Hub id.",
            show_default=False,
        ),
    ],
    b: Annotated[
        Path, typer.Argument(metavar="B", help="The model to compare with A.", show_default=False)
    ],
    text: Annotated[
        str | None,
        typer.Option(
            "--text",
            help="Compare the outputs for each line of this file (- for standard input); a tab "
            "separates the texts of a pair. Default: a few English and Korean texts.",
        ),
    ] = None,
    tolerance: Annotated[
        float,
        typer.Option(help="Largest absolute difference that counts as equal.", min=0),
    ] = 1e-5,
    device: Device = "cpu",
    as_json: Annotated[bool, typer.Option("--json", help="Print the result as JSON.")] = False,
) -> None:
    """Compare the config, weights and outputs of two models.

    Exit status: 0 if they are equal within the tolerance, 1 if they differ, 2 after an error.
    """
    check_device(device)
    check_readable(text)
    a, b = find_model(a), find_model(b)
    from bertsmith.use.inspection.compare import compare as compare_models

    lines = list(read_lines(text)) if text is not None else None
    comparison = compare_models(a, b, lines, tolerance=tolerance, device=resolve_device(device))
    if as_json:
        print_json(comparison.to_json())
    else:
        _print_comparison(comparison)
    if not comparison.is_equal:
        raise typer.Exit(EXIT_DIFFERENT)


def _print_comparison(comparison: "Comparison") -> None:
    for name, path in zip("AB", comparison.paths, strict=True):
        print_line(f"{name}  {path}")
    print_line("")
    num_fields = len(comparison.config)
    print_line(
        f"config: {count_noun(num_fields, 'field differs', 'fields differ')}"
        if num_fields
        else "config: equal"
    )
    print_table(
        _VALUE_COLUMNS, ((name, *map(str, values)) for name, values in comparison.config.items())
    )
    _print_vocabulary_comparison(comparison.vocabulary)
    _print_tensors(comparison)
    _print_outputs(comparison)
    print_line("")
    verdict = "equal" if comparison.is_equal else "different"
    print_line(f"{verdict} (tolerance {comparison.tolerance:g})")


def _print_vocabulary_comparison(vocabulary: "VocabularyComparison") -> None:
    """Print the number of different ids, the first of them, and the tokenizer settings."""
    sizes = " and ".join(f"{size:,}" for size in dict.fromkeys(vocabulary.sizes))
    state = (
        count_noun(vocabulary.num_different_ids, "id differs", "ids differ")
        if vocabulary.num_different_ids
        else "equal"
    )
    print_line(f"vocabulary: {state} ({sizes} words)")
    print_table(
        ("id", "A", "B"),
        (
            (str(token_id), "-" if word_a is None else word_a, "-" if word_b is None else word_b)
            for token_id, word_a, word_b in vocabulary.examples
        ),
    )
    print_table(
        _VALUE_COLUMNS,
        ((name, *map(str, values)) for name, values in vocabulary.settings.items()),
    )


def _print_tensors(comparison: "Comparison") -> None:
    """Print the number of equal tensors and a table of the others."""
    differences = [
        (name, difference)
        for name, difference in comparison.tensors.items()
        if difference.max_abs_difference != 0
    ]
    num_tensors = len(comparison.tensors)
    print_line(f"tensors: {num_tensors - len(differences):,} of {num_tensors:,} are bitwise equal")
    differences.sort(key=lambda item: _get_sort_key(item[1]), reverse=True)
    _print_differences(differences[:_MAX_TENSORS])
    if len(differences) > _MAX_TENSORS:
        print_line(f"  and {len(differences) - _MAX_TENSORS:,} more (--json lists all)")


def _get_sort_key(difference: "Difference") -> float:
    """Return the largest absolute difference; infinity if two tensors cannot be subtracted."""
    largest_difference = difference.max_abs_difference
    return math.inf if largest_difference is None else largest_difference


def _print_outputs(comparison: "Comparison") -> None:
    """Print the differences of the outputs, and how many texts were truncated or skipped."""
    print_line(
        f"outputs for {count_noun(comparison.num_texts, 'text')}, "
        f"{count_noun(comparison.num_tokens, 'token')}:"
    )
    _print_differences(comparison.outputs.items())
    if comparison.num_truncated:
        print_line(
            f"  {count_noun(comparison.num_truncated, 'text')} truncated to the shorter "
            "maximum length of the two models"
        )
    if comparison.num_skipped_pairs:
        print_line(
            f"  {count_noun(comparison.num_skipped_pairs, 'pair')} skipped: a model has "
            "only one segment"
        )
    if comparison.tokenized_differently:
        num_texts = len(comparison.tokenized_differently)
        print_line(f"  {count_noun(num_texts, 'text')} skipped: different tokenizations:")
        text, tokens_a, tokens_b = comparison.tokenized_differently[0]
        print_line(f"  {text}")
        print_line(f"    A  {' '.join(tokens_a)}")
        print_line(f"    B  {' '.join(tokens_b)}")


def _print_differences(differences: "Iterable[tuple[str, Difference]]") -> None:
    """Print a table with a row for each named difference of tensors or outputs."""
    rows = []
    for name, difference in differences:
        absolute = _format_number(difference.max_abs_difference)
        relative = _format_number(difference.relative_difference)
        rows.append((name, absolute, relative, _describe_mismatch(difference)))
    print_table(("", "largest difference", "relative", ""), rows)


def _format_number(value: float | None) -> str:
    """Return a number with 3 significant digits, or a dash for None."""
    return "-" if value is None else f"{value:.3g}"


def _describe_mismatch(difference: "Difference") -> str:
    """Return why two tensors cannot be subtracted, or an empty string if they can."""
    shape_a, shape_b = difference.shapes
    if shape_a is None:
        return "only in B"
    if shape_b is None:
        return "only in A"
    if difference.max_abs_difference is None:
        return f"shapes {shape_a} and {shape_b}"
    return ""
