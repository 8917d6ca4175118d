"""Run the commands of README.md that use a reference model, and replace their outputs.

Run it after a change of models/. The commands are those in console blocks that start with
``$ bertsmith fill mini-``.
"""

import re
import shlex
import subprocess
import sys
from pathlib import Path

README = Path(__file__).resolve().parent.parent / "README.md"
#: A command, and the output up to the next command or the end of the block.
COMMAND = re.compile(r"^(\$ (bertsmith fill mini-.*)\n)(?:(?!\$ |```).*\n)*", re.MULTILINE)


def run_command(match: re.Match[str]) -> str:
    """Return a command line of the README followed by its current output."""
    command = [sys.executable, "-m", *shlex.split(match[2])]
    completed = subprocess.run(  # noqa: S603 - the command is that of the README
        command, check=True, stdout=subprocess.PIPE, text=True, cwd=README.parent
    )
    return match[1] + completed.stdout


def main() -> None:
    """Rewrite README.md."""
    text, count = COMMAND.subn(run_command, README.read_text(encoding="utf-8"))
    README.write_text(text, encoding="utf-8")
    print(f"ran {count} command{'s' * (count != 1)}; wrote {README.name}")


if __name__ == "__main__":
    main()
