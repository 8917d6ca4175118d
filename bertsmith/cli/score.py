"""``bertsmith score``: the pseudo-log-likelihood of each line of a text.

It never knows how the scores are found.
"""

import math
from typing import TYPE_CHECKING, Annotated, Any

import typer

from bertsmith.cli.app import app
from bertsmith.cli.console import TerminalProgress, log, print_json, print_line
from bertsmith.cli.model_options import (
    STDIN,
    Device,
    Json,
    Model,
    check_readable,
    load_model,
    read_lines,
)
from bertsmith.cli.unknown_warning import UnknownWarning
from bertsmith.errors import InputError

if TYPE_CHECKING:
    from bertsmith.use.score import Score


@app.command()
def score(
    model: Model,
    file: Annotated[
        str | None,
        typer.Argument(
            metavar="FILE",
            help="A text file, a line a text; - or nothing reads standard input.",
            show_default=False,
        ),
    ] = None,
    text: Annotated[
        list[str] | None,
        typer.Option(help="A text to score, in place of a file; may be given again."),
    ] = None,
    tokens: Annotated[bool, typer.Option("--tokens", help="Show each token's own score.")] = False,
    device: Device = "auto",
    as_json: Json = False,
) -> None:
    """Score lines by how well a model predicts their tokens.

    The score is the pseudo-log-likelihood: each token is masked in turn (Salazar et al. 2020).
    Prints the sum in nats, the mean a token, the pseudo-perplexity, the number of tokens and the
    line, with tabs between them. A line that is empty or too long has dashes, and says why.
    """
    if text and file is not None:
        raise InputError("a file and --text were both given; expected one of them")
    check_readable(file)
    unknown = UnknownWarning()
    bundle = unknown.with_token_counts(load_model(model, device))
    from bertsmith.use.score import iter_scores

    lines = iter(text) if text else read_lines(file or STDIN)
    totals = _Totals()
    for number, result in enumerate(iter_scores(bundle, lines, TerminalProgress()), 1):
        totals.add(result)
        if not text and file in (None, STDIN):
            unknown.warn()
        if as_json:
            print_json(_plain(number, result, tokens=tokens))
            continue
        print_line(_row(result))
        if tokens:
            for token, value in zip(result.tokens, result.log_probabilities, strict=False):
                print_line(f"  {value:9.4f}  {token}")
    totals.tell()
    unknown.warn()


class _Totals:
    """Sums over all lines, and the lines that have no score."""

    def __init__(self) -> None:
        self.lines = self.tokens = 0
        self.total = 0.0
        self.problems: dict[str, int] = {}

    def add(self, result: "Score") -> None:
        """Count one line."""
        if result.problem:
            reason = result.problem.partition(":")[0]
            self.problems[reason] = self.problems.get(reason, 0) + 1
            return
        self.lines += 1
        self.tokens += len(result.tokens)
        self.total += result.total

    def tell(self) -> None:
        """Say the sums, and what was left without a score."""
        if self.tokens:
            mean = self.total / self.tokens
            log(
                f"lines scored: {self.lines:,}; tokens: {self.tokens:,}; sum {self.total:,.2f} "
                f"nats, {mean:.4f} a token; pseudo-perplexity {math.exp(-mean):,.2f}"
            )
        for reason, count in self.problems.items():
            log(f"lines without a score: {count:,} ({reason})")
        if not self.tokens and not self.problems:
            log("there was no line to score")


def _row(result: "Score") -> str:
    if result.problem:
        return f"-\t-\t-\t-\t{result.text}\t({result.problem})"
    figures = f"{result.total:.4f}\t{result.per_token:.4f}\t{result.perplexity:.4f}"
    return f"{figures}\t{len(result.tokens)}\t{result.text}"


def _plain(number: int, result: "Score", *, tokens: bool) -> dict[str, Any]:
    """Return a score as JSON; a line without one has its problem instead of figures."""
    named: dict[str, Any] = {"line": number, "text": result.text}
    if result.problem:
        return named | {"problem": result.problem}
    named |= {
        "log_likelihood": result.total,
        "per_token": result.per_token,
        "pseudo_perplexity": result.perplexity,
        "tokens": len(result.tokens),
    }
    if tokens:
        each = zip(result.tokens, result.log_probabilities, strict=True)
        named["each"] = [[token, value] for token, value in each]
    return named
