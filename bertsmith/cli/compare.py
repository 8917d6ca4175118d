"""``bertsmith compare``: where two models differ, tensor by tensor and output by output.

It never knows how a difference is found.
"""

from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from bertsmith.cli.app import app
from bertsmith.cli.console import print_json, print_line, print_table
from bertsmith.cli.model_options import (
    Device,
    check_device,
    check_readable,
    read_lines,
    resolve_device,
)
from bertsmith.cli.models import find_model

if TYPE_CHECKING:
    from bertsmith.use.inspection.compare import Comparison, Difference, VocabularyComparison

#: The exit status where the models differ.
EXIT_DIFFERENT = 1
#: Tensors shown, the farthest apart first; --json has all.
_SHOWN = 20
_COLUMNS = ("", "A", "B")


@app.command()
def compare(
    a: Annotated[
        Path, typer.Argument(metavar="A", help="A model directory or a RUN.", show_default=False)
    ],
    b: Annotated[
        Path, typer.Argument(metavar="B", help="The one to compare it with.", show_default=False)
    ],
    text: Annotated[
        str | None,
        typer.Option(
            "--text",
            help="Ask both about each line of this file (- for standard input) instead of a few "
            "sentences in English and Korean; a tab parts the two texts of a pair.",
        ),
    ] = None,
    tolerance: Annotated[
        float, typer.Option(help="The largest absolute difference that counts as none.", min=0)
    ] = 1e-5,
    device: Device = "cpu",
    as_json: Annotated[bool, typer.Option("--json", help="Result as JSON on stdout.")] = False,
) -> None:
    """Show where two models differ: config, vocabulary, weights, and outputs on the same texts.

    Exits with 0 if they are equal within the tolerance, with 1 if anything differs, with 2 after
    an error.
    """
    check_device(device)
    check_readable(text)
    a, b = find_model(a), find_model(b)
    from bertsmith.use.inspection import compare as comparing

    lines = list(read_lines(text)) if text is not None else None
    found = comparing.compare(a, b, lines, tolerance=tolerance, device=resolve_device(device))
    if as_json:
        print_json(found.to_json())
    else:
        _show(found)
    if not found.is_equal:
        raise typer.Exit(EXIT_DIFFERENT)


def _show(found: "Comparison") -> None:
    for name, path in zip("AB", found.paths, strict=True):
        print_line(f"{name}  {path}")
    print_line("")
    print_line(f"config: {len(found.config):,} fields differ" if found.config else "config: equal")
    print_table(_COLUMNS, ((name, *map(str, both)) for name, both in found.config.items()))
    _show_vocabulary(found.vocabulary)
    _show_tensors(found)
    _show_outputs(found)
    print_line("")
    verdict = "equal" if found.is_equal else "different"
    print_line(f"{verdict} (tolerance {found.tolerance:g})")


def _show_vocabulary(found: "VocabularyComparison") -> None:
    sizes = " and ".join(f"{size:,}" for size in dict.fromkeys(found.sizes))
    state = f"{found.num_different_ids:,} ids differ" if found.num_different_ids else "equal"
    print_line(f"vocabulary: {state} ({sizes} words)")
    print_table(
        ("id", "A", "B"),
        ((f"{number}", *("-" if word is None else word for word in words))
         for number, *words in found.examples),
    )  # fmt: skip
    print_table(_COLUMNS, ((name, *map(str, both)) for name, both in found.settings.items()))


def _show_tensors(found: "Comparison") -> None:
    exact = sum(one.max_abs_difference == 0 for one in found.tensors.values())
    print_line(f"tensors: {exact:,} of {len(found.tensors):,} equal bit for bit")
    apart = {name: one for name, one in found.tensors.items() if one.max_abs_difference != 0}
    # A shape or a tensor that one side lacks comes before any number.
    order = sorted(apart, key=lambda name: (apart[name].max_abs_difference is not None,
                                            -(apart[name].max_abs_difference or 0)))  # fmt: skip
    _show_measures((name, apart[name]) for name in order[:_SHOWN])
    if len(order) > _SHOWN:
        print_line(f"  and {len(order) - _SHOWN:,} more (--json has all)")


def _show_outputs(found: "Comparison") -> None:
    print_line(f"outputs on {found.num_texts:,} texts, {found.num_tokens:,} tokens:")
    _show_measures(found.outputs.items())
    if found.num_truncated:
        print_line(f"  {found.num_truncated:,} texts cut off at the length that both models take")
    if found.num_skipped_pairs:
        print_line(f"  {found.num_skipped_pairs:,} pairs left out: a model knows one segment only")
    if found.tokenized_differently:
        print_line(
            f"  {len(found.tokenized_differently):,} texts left out, which the tokenizers cut otherwise:"
        )
        text, *both = found.tokenized_differently[0]
        print_line(f"  {text}")
        for name, tokens in zip("AB", both, strict=True):
            print_line(f"    {name}  {' '.join(tokens)}")


def _show_measures(measures: "Iterable[tuple[str, Difference]]") -> None:
    print_table(
        ("", "largest difference", "relative", ""),
        (
            (name, _number(one.max_abs_difference), _number(one.relative), _note(one))
            for name, one in measures
        ),
    )


def _number(value: float | None) -> str:
    return "-" if value is None else f"{value:.3g}"


def _note(found: "Difference") -> str:
    a, b = found.shapes
    if a is None or b is None:
        return "only in B" if a is None else "only in A"
    return "" if found.max_abs_difference is not None else f"shapes {a} and {b}"
