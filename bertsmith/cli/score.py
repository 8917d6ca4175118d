"""``bertsmith score``: compute the pseudo-log-likelihood of lines."""

import sys
from typing import TYPE_CHECKING, Annotated, Any

import typer

from bertsmith.cli.app import app, format_examples
from bertsmith.cli.console import TerminalProgress, log, print_json, print_line
from bertsmith.cli.model_options import (
    STDIN,
    Device,
    Fast,
    Json,
    LinesFormatOption,
    Model,
    PllOption,
    check_readable,
    check_unused_options,
    load_model,
    open_lines,
)
from bertsmith.cli.unknown_warning import UnknownTokenWarning
from bertsmith.errors import InputError

if TYPE_CHECKING:
    from bertsmith.use.score import Score


@app.command(
    epilog=format_examples(
        "bertsmith score my-run sentences.txt",
        'bertsmith score my-run --text "the cat sat" --text "cat the sat" --tokens',
        "bertsmith score my-run sentences.txt --pll within-word --json",
    )
)
def score(
    model: Model,
    file: Annotated[
        str | None,
        typer.Argument(
            metavar="FILE",
            help="A text file with one text per line. Default or -: standard input.",
            show_default=False,
        ),
    ] = None,
    text: Annotated[
        list[str] | None,
        typer.Option(help="A text to score instead of a file; may be repeated."),
    ] = None,
    tokens: Annotated[bool, typer.Option("--tokens", help="Also print a score per token.")] = False,
    lines_format: LinesFormatOption = None,
    pll: Annotated[
        PllOption,
        typer.Option(
            help="Mask only the token to predict (original), or also the following tokens of its "
            "word (within-word)."
        ),
    ] = "original",
    fast: Fast = False,
    device: Device = "auto",
    as_json: Json = False,
) -> None:
    """Compute the pseudo-log-likelihood of each line.

    Masks each token in turn and sums the log-probabilities of the masked tokens (Salazar et al.
    2020). With --pll within-word, the tokens that follow in the same word are masked too, so that
    the beginning of a word is not predicted from its end (PLL-word-l2r of Kauf and Ivanova 2023).

    Prints tab-separated columns: the sum in nats, the mean per token, the pseudo-perplexity, the
    number of tokens, and the line. For a line that is empty or too long, prints dashes and the
    reason.
    """
    if text and file is not None:
        raise InputError("both a file and --text: use one of them")
    if text:
        check_unused_options({"--format": lines_format}, "not valid with --text; remove it")
    if file and " " in file:
        check_readable(file, "; to score a text instead of a file, use --text")
    lines = iter(text) if text else open_lines(file or STDIN, lines_format)
    unknown = UnknownTokenWarning()
    bundle = unknown.with_token_counter(load_model(model, device, fast=fast, needs_mlm_head=True))
    from bertsmith.use.score import iter_scores

    settings: dict[str, Any] = {"variant": pll}
    if not text and file in (None, STDIN) and sys.stdin.isatty():
        # The user types the lines.
        settings["chunk_size"] = 1
    scores = iter_scores(bundle, lines, TerminalProgress(), **settings)
    totals = _Totals()
    for number, line_score in enumerate(scores, 1):
        totals.add(line_score)
        if not text and file in (None, STDIN):
            unknown.warn()
        if as_json:
            print_json(_score_to_json(number, line_score, include_tokens=tokens))
            continue
        print_line(_format_row(line_score))
        if tokens:
            # A line without a score has no log-probabilities.
            for token, log_probability in zip(
                line_score.tokens, line_score.log_probabilities, strict=False
            ):
                print_line(f"  {log_probability:9.4f}  {token}")
    totals.log()
    unknown.warn()


class _Totals:
    """Sums over all scored lines, and the number of lines without a score for each reason."""

    def __init__(self) -> None:
        self.num_lines = self.num_tokens = 0
        self.log_likelihood = 0.0
        self.num_unscored_lines: dict[str, int] = {}

    def add(self, line_score: "Score") -> None:
        """Add the score of a line."""
        if line_score.problem:
            reason = line_score.problem.partition(":")[0]
            self.num_unscored_lines[reason] = self.num_unscored_lines.get(reason, 0) + 1
            return
        self.num_lines += 1
        self.num_tokens += len(line_score.tokens)
        self.log_likelihood += line_score.total

    def log(self) -> None:
        """Log the sums and the numbers of lines without a score."""
        if self.num_tokens:
            from bertsmith.use.score import compute_perplexity

            mean = self.log_likelihood / self.num_tokens
            log(
                f"lines scored: {self.num_lines:,}; tokens: {self.num_tokens:,}; "
                f"sum {self.log_likelihood:,.2f} nats, {mean:.4f} per token; "
                f"pseudo-perplexity {compute_perplexity(mean):,.2f}"
            )
        for reason, count in self.num_unscored_lines.items():
            log(f"lines without a score: {count:,} ({reason})")


def _format_row(line_score: "Score") -> str:
    """Return a score as tab-separated columns."""
    if line_score.problem:
        return f"-\t-\t-\t-\t{line_score.text}\t({line_score.problem})"
    metrics = f"{line_score.total:.4f}\t{line_score.per_token:.4f}\t{line_score.perplexity:.4f}"
    return f"{metrics}\t{len(line_score.tokens)}\t{line_score.text}"


def _score_to_json(number: int, line_score: "Score", *, include_tokens: bool) -> dict[str, Any]:
    """Return a score as JSON; a line without a score has an ``error``."""
    fields: dict[str, Any] = {"line": number, "text": line_score.text}
    if line_score.problem:
        return fields | {"error": line_score.problem}
    fields |= {
        "pseudo_log_likelihood": line_score.total,
        "pseudo_log_likelihood_per_token": line_score.per_token,
        "pseudo_perplexity": line_score.perplexity,
        "num_tokens": len(line_score.tokens),
    }
    if include_tokens:
        pairs = zip(line_score.tokens, line_score.log_probabilities, strict=True)
        fields["token_log_probabilities"] = [
            [token, log_probability] for token, log_probability in pairs
        ]
    return fields
