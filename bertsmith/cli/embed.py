"""``bertsmith embed``: the vectors of lines, into a file or as lines of JSON.

It never knows how a vector is made.
"""

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from bertsmith.cli.app import app
from bertsmith.cli.asking import (
    STDIN,
    Device,
    Model,
    check_device,
    check_input,
    lines_of,
    resolved_device,
)
from bertsmith.cli.console import Bars, put, put_json, say
from bertsmith.cli.hints import quoted
from bertsmith.cli.models import find_model
from bertsmith.cli.unknown import UnknownWarning
from bertsmith.errors import QuestionError, SettingsError

if TYPE_CHECKING:
    from bertsmith.use.embed import Embedder
    from bertsmith.use.vector_settings import VectorSettings

Layer = Annotated[
    str | None,
    typer.Option(
        help="A layer's number: -1 the last, as usual, -2 the one before, 0 the embeddings; or "
        "several, parted by commas, such as -4,-3,-2,-1.",
        show_default=False,
    ),
]
File = Annotated[
    str | None,
    typer.Argument(
        metavar="FILE",
        help="A text file, a line a text; - or nothing reads standard input.",
        show_default=False,
    ),
]
#: What to do with each form of file.
_NEXT = {
    ".npy": "in Python, numpy.load({text})",
    ".jsonl": "head -n 1 {word}",
    ".parquet": "in Python, pyarrow.parquet.read_table({text})",
    ".index": 'bertsmith search {word} "..."',
}
#: Bytes read at once to count lines, and the most that are read for that: a few seconds.
_BLOCK, _COUNTED = 2**20, 2**33


@app.command()
def embed(
    model: Model,
    file: File = None,
    layer: Layer = None,
    combine: Annotated[
        str, typer.Option(help="Several layers: concat, mean, or weighted by --weights.")
    ] = "concat",
    weights: Annotated[
        str | None, typer.Option(help="A weight for each layer, such as 0.1,0.2,0.3,0.4.")
    ] = None,
    pooling: Annotated[
        str | None,
        typer.Option(
            help="mean, max, mean-max, first, last, pooled, or none: a vector a token; or "
            "sentence-transformers' mean_sqrt_len_tokens and weightedmean. Else as the model says, "
            "or mean.",
            show_default=False,
        ),
    ] = None,
    normalize: Annotated[
        bool | None,
        typer.Option(
            "--normalize/--no-normalize",
            help="Vectors of length 1; else as the model says, or no (an export to "
            "sentence-transformers: or yes).",
        ),
    ] = None,
    special: Annotated[
        bool, typer.Option("--special/--no-special", help="Pool [CLS] and [SEP] with the text.")
    ] = True,
    out: Annotated[
        Path | None,
        typer.Option(
            help="The file to write: .npy, .parquet, .jsonl, or .index to be searched. Without it, "
            "lines of JSON on stdout.",
            show_default=False,
        ),
    ] = None,
    resume: Annotated[
        bool, typer.Option("--resume", help="Go on with a file whose making was stopped.")
    ] = False,
    batch_tokens: Annotated[
        int | None,
        typer.Option(min=1, help="Tokens of a batch; else as fits.", show_default=False),
    ] = None,
    fast: Annotated[
        bool,
        typer.Option("--fast", help="Weights in 8 or 16 bits: a cosine of 0.995 or more to exact."),
    ] = False,
    device: Device = "auto",
    as_json: Annotated[
        bool, typer.Option("--json", help="What was written, as JSON on stdout.")
    ] = False,
) -> None:
    """Make a vector of each line: of any layer, pooled as you say; or a vector of each token.

    Only the layers that are asked for are computed. What --out names is written in pieces: a run
    that is stopped, even by kill -9, goes on with --resume and ends with the same bytes (an
    index's graph, which several threads join, with the same vectors).
    """
    if resume and out is None:
        raise QuestionError("--resume goes on with a file: name it with --out")
    settings = vector_settings(
        layer, combine=combine, weights=numbers_of("weights", weights), pooling=pooling,
        normalize=normalize, special=special,
    )  # fmt: skip
    check_device(device)
    check_input(file)
    model = _checked(model, out, settings)
    from bertsmith.use.embed import Embedder

    unknown = UnknownWarning()
    embedder = Embedder.load(model, device=resolved_device(device), fast=fast)
    embedder = embedder.counting(unknown.counts)
    if out is None:
        _print(embedder, file or STDIN, settings, batch_tokens, unknown)
    else:
        more = {"batch_tokens": batch_tokens, "resume": resume}
        _write(embedder, file or STDIN, out, settings, more, as_json=as_json)
    unknown.warn()


def _checked(model: Path, out: Path | None, settings: "VectorSettings") -> Path:
    """Return the model to load. Raises where it, or the file to write, cannot be used."""
    if out is None:
        return find_model(model)
    from bertsmith.bundle.directory import locate

    if out.suffix not in _NEXT:
        raise QuestionError(f"{out}: expected a name that ends in {', '.join(_NEXT)}")
    if settings.pooling == "none" and out.suffix in (".npy", ".index"):
        raise QuestionError(f"{out}: a vector a token fits .jsonl and .parquet only")
    if out.exists() or out.is_symlink():
        raise QuestionError(f"{out}: it is there already; choose another name, or remove it")
    # The file remembers its model, so a temporary copy of a checkpoint does not do.
    locate(model)
    return model


def numbers_of(option: str, said: str | None) -> list[float] | None:
    """Return numbers parted by commas. Raises SettingsError."""
    if said is None:
        return None
    try:
        return [float(one) for one in said.split(",")]
    except ValueError:
        raise SettingsError(f"--{option} {said}: expected numbers, parted by commas") from None


def vector_settings(layer: str | None, **said: Any) -> "VectorSettings":
    """Return settings with layers as they are written on the command line. Raises SettingsError."""
    from bertsmith.use.vector_settings import settings_of

    layers = numbers_of("layer", layer)
    if layers is not None and any(one % 1 for one in layers):
        raise SettingsError(f"--layer {layer}: expected whole numbers, such as -2 or -4,-3,-2,-1")
    return settings_of(None if layers is None else [int(one) for one in layers], **said)


def _print(
    embedder: "Embedder", name: str, settings: "VectorSettings", batch_tokens: int | None,
    unknown: UnknownWarning,
) -> None:  # fmt: skip
    from bertsmith.use.embedfile import embed_windows
    from bertsmith.use.sinks import json_line

    at_once = name == STDIN and sys.stdin.isatty()
    windows = embed_windows(
        embedder, lines_of(name), embedder.recipe(settings), batch_tokens=batch_tokens,
        at_once=at_once,
    )  # fmt: skip
    cut_off = 0
    for window in windows:
        for text, own in zip(window.texts, window.found, strict=True):
            put(json_line(text, own))
        sys.stdout.flush()
        cut_off += window.cut_off
        if name == STDIN:
            unknown.warn()
    _tell_cut(cut_off, embedder)


def _write(
    embedder: "Embedder", name: str, out: Path, settings: "VectorSettings",
    more: dict[str, Any], *, as_json: bool,
) -> None:  # fmt: skip
    from bertsmith.use.embedfile import embed_lines

    try:
        done = embed_lines(
            embedder, lines_of(name), out, settings, total=line_count(name), progress=Bars(), **more
        )
    except KeyboardInterrupt:
        say("stopped; what is done is safe, and the same command with --resume goes on from there")
        raise
    if as_json:
        put_json({"out": str(out), "lines": done.lines, "width": done.width,
                  "cut_off": done.cut_off, "unknown_share": done.unknown_share})  # fmt: skip
    _tell_cut(done.cut_off, embedder)
    each = "a vector a token" if settings.pooling == "none" else "a vector a line"
    say(f"wrote {out}: {done.lines:,} lines, {each}, of {done.width:,} numbers")
    say(f"next: {_NEXT[out.suffix].format(text=repr(str(out)), word=quoted(out))}")


def _tell_cut(count: int, embedder: "Embedder") -> None:
    if count:
        say(f"lines cut off at the model's {embedder.longest:,} tokens: {count:,}")


def line_count(name: str) -> int | None:
    """Return how many lines a plain file has; None where that cannot be told quickly."""
    from bertsmith.text.archives import HEAD, packing

    path = Path(name)
    if name == STDIN or not path.is_file() or path.stat().st_size > _COUNTED:
        return None
    count, last = 0, b"\n"
    try:
        with path.open("rb") as file:
            if packing(file.read(HEAD)):
                return None
            file.seek(0)
            while block := file.read(_BLOCK):
                count, last = count + block.count(b"\n"), block[-1:]
    except OSError:
        # Whoever reads the lines says why.
        return None
    return count + (last != b"\n")
