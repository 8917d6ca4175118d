"""``bertsmith evaluate --minimal-pairs``: compute the accuracy on minimal pairs of sentences."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from rich.cells import cell_len, set_cell_size

from bertsmith.cli.console import TerminalProgress, log, print_json, print_line
from bertsmith.cli.model_options import PllOption, check_readable, load_model
from bertsmith.cli.unknown_warning import UnknownTokenWarning
from bertsmith.files import check_new_file
from bertsmith.plurals import count_noun

if TYPE_CHECKING:
    from bertsmith.use.minimal_pairs import MinimalPairResults
    from bertsmith.use.pseudo_log_likelihood import PllVariant


def evaluate_minimal_pairs(
    model: Path,
    files: Sequence[Path],
    pll: PllOption | None,
    *,
    skip_invalid: bool,
    encoding: str | None,
    out: Path | None,
    device: str,
    fast: bool,
    as_json: bool,
) -> None:
    """Print the accuracy of a model on minimal pairs, for all PLL variants if ``pll`` is None."""
    for file in files:
        if not file.is_dir():
            check_readable(file)
    if out is not None:
        from bertsmith.use.table_output import get_output_format

        get_output_format(out)
        check_new_file(out)
    unknown = UnknownTokenWarning()
    bundle = unknown.with_token_counter(load_model(model, device, fast=fast, needs_mlm_head=True))
    from bertsmith.use import minimal_pairs
    from bertsmith.use.pseudo_log_likelihood import PLL_VARIANTS

    results = minimal_pairs.evaluate_minimal_pairs(
        bundle,
        files,
        variants=PLL_VARIANTS if pll is None else [pll],
        skip_invalid=skip_invalid,
        encoding=encoding or "utf-8",
        out=out,
        progress=TerminalProgress(),
    )
    unknown.warn()
    if as_json:
        print_json(results.as_dict())
    else:
        _print_results(results)
    _log_notes(results)
    if out is not None:
        log(f"wrote {out}: {count_noun(results.overall.num_pairs, 'pair')}")


def _print_results(results: "MinimalPairResults") -> None:
    """Print a table with the accuracy on each file and, for several files, on all of them."""
    overall = results.overall
    rows: list[tuple[str, str, Mapping[PllVariant, float]]] = [
        (str(file), f"{result.num_pairs:,}", result.accuracy)
        for file, result in results.files.items()
    ]
    if len(rows) > 1:
        rows.append(("all pairs", f"{overall.num_pairs:,}", overall.accuracy))
        rows.append(("mean of files", "", results.mean_accuracy))
    name_width = max(cell_len(name) for name, _, _ in rows)
    pairs_width = max(len("pairs"), len(f"{overall.num_pairs:,}"))
    header = [" " * name_width, "pairs".rjust(pairs_width), *overall.accuracy]
    print_line("  ".join(header))
    for name, num_pairs, accuracy in rows:
        cells = [set_cell_size(name, name_width), num_pairs.rjust(pairs_width)]
        cells += [f"{value:.4f}".rjust(len(variant)) for variant, value in accuracy.items()]
        print_line("  ".join(cells))


def _log_notes(results: "MinimalPairResults") -> None:
    """Log the number of ties (equal scores of both sentences) and of skipped pairs."""
    for variant, count in results.overall.num_ties.items():
        if count:
            log(f"ties with --pll {variant}, counted as incorrect: {count:,}")
    if results.num_skipped:
        log(
            f"skipped {count_noun(results.num_skipped, 'pair')}; the first: {results.first_skipped}"
        )
