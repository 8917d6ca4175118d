"""The Typer application, the sections of its help, and its global options."""

import os
import sys
from typing import Annotated, Any

import typer
from typer.core import TyperGroup

from bertsmith.cli.launcher import check_command
from bertsmith.cli.signals import Interrupted
from bertsmith.version import __version__

SUMMARY = "Train your own BERT from text, fine-tune it, and use or serve it."

#: Sections of ``bertsmith --help`` and their commands, in order.
HELP_SECTIONS = {
    "Getting started": ("demo",),
    "Data": ("corpus", "vocab", "prepare"),
    "Training": ("pretrain", "finetune", "distill", "mine", "evaluate"),
    "Inference": ("predict", "fill", "pair", "score", "embed", "similar", "search", "rerank"),
    "Models": ("inspect", "compare", "import", "export", "push"),
    "Serving": ("serve",),
    "Research": ("lab",),
}


class CommandGroup(TyperGroup):
    """A command group whose help shows the whole summary of each command."""

    def get_help_sections(self) -> dict[str, tuple[str, ...]]:
        """Return the command names of each section of the help by its title."""
        return {"Commands": tuple(self.commands)}

    def format_commands(self, ctx: Any, formatter: Any) -> None:
        """Write the name and the wrapped summary of each command below its section's title."""
        name_width = max(map(len, self.commands))
        for title, command_names in self.get_help_sections().items():
            rows = [
                (name.ljust(name_width), self.commands[name].get_short_help_str(sys.maxsize))
                for name in command_names
            ]
            with formatter.section(title):
                formatter.write_dl(rows)


class GroupWithDefaultCommand(CommandGroup):
    """Runs the command that was registered first if the first argument is not a command.

    An argument that has the same name as a command must be passed with its folder: ``./extend``.
    """

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        """Insert the default command if the first argument is not a command."""
        if args and args[0] not in self.commands and args[0] not in ctx.help_option_names:
            args = [next(iter(self.commands)), *args]
        return super().parse_args(ctx, args)


class _SectionedGroup(CommandGroup):
    def get_help_sections(self) -> dict[str, tuple[str, ...]]:
        return HELP_SECTIONS

    def invoke(self, ctx: Any) -> Any:
        """Run the command; raise Interrupted after Ctrl-C, on which Typer would exit silently."""
        try:
            return super().invoke(ctx)
        except KeyboardInterrupt:
            raise Interrupted(ctx.invoked_subcommand or "") from None


app = typer.Typer(
    name="bertsmith",
    cls=_SectionedGroup,
    help=SUMMARY,
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
)


def format_examples(*commands: str) -> str:
    r"""Return the Examples section at the end of a command's help.

    The leading ``\b`` keeps Click from rewrapping the lines.
    """
    lines = "\n".join(f"  {command}" for command in commands)
    return f"\b\nExamples:\n{lines}"


def _print_version(is_requested: bool) -> None:
    if is_requested:
        typer.echo(f"bertsmith {__version__}")
        raise typer.Exit


@app.callback(
    help=SUMMARY,
    epilog=format_examples(
        "bertsmith demo",
        "bertsmith fill bertsmith-demo/run-0 'Return the [MASK] of the list.'",
        "bertsmith pretrain --help",
    ),
)
def main_options(
    context: typer.Context,
    debug: Annotated[
        bool, typer.Option(help="Show the traceback if a command fails.", show_default=False)
    ] = False,
    version: Annotated[  # noqa: ARG001 - handled by the callback
        bool,
        typer.Option(
            "--version", help="Show the version and exit.", callback=_print_version, is_eager=True
        ),
    ] = False,
) -> None:
    """Set the global options."""
    if debug:
        os.environ["BERTSMITH_DEBUG"] = "1"
    check_command(context.invoked_subcommand)
