"""Write what documents take from code and figures: help, names, the file tree, results.

It never writes prose. ``--check`` writes nothing, and fails if something would change.
"""

import argparse
import ast
import io
import json
import os
import sys
from collections.abc import Iterator
from contextlib import redirect_stdout
from pathlib import Path
from statistics import median
from typing import Any

from typer.main import get_command

import bertsmith
from bertsmith.cli import commands as registered_commands  # noqa: F401
from bertsmith.cli import lab
from bertsmith.cli.app import app

ROOT = Path(__file__).resolve().parent.parent
#: Help pages look the same wherever they are made.
WIDTH = {"COLUMNS": "80", "NO_COLOR": "1", "TERM": "dumb"}
#: Folders beside the package, told in the README's tree.
BESIDE = {
    "benchmarks": "speed and quality beside the peer, in ratios",
    "examples": "notebooks with their outputs; the tests run them anew",
    "docs": "the paper's map, deviations, glossary, help pages",
    "tests": "mirrors the package; architecture/ and walk/ hold the whole together",
}


def commands(group: Any, path: tuple[str, ...] = ()) -> Iterator[tuple[str, ...]]:
    """Yield the words of every verb, a group before its members; ``()`` is the program itself."""
    yield path
    for name, command in getattr(group, "commands", {}).items():
        yield from commands(command, (*path, name))


def help_text(path: tuple[str, ...]) -> str:
    """Return what ``bertsmith WORDS --help`` prints on a terminal of 80 columns."""
    # Not typer's test runner: it sets a width of its own, two columns wider than a terminal's.
    printed = io.StringIO()
    with redirect_stdout(printed):
        get_command(app).main([*path, "--help"], prog_name="bertsmith", standalone_mode=False)
    return "\n".join(line.rstrip() for line in printed.getvalue().strip("\n").splitlines())


def help_pages() -> dict[Path, str]:
    """Return each help page by its file: one a verb, and one of the program."""
    pages = {}
    for path in commands(get_command(app)):
        title = " ".join(("bertsmith", *path))
        file = ROOT / "docs" / "cli" / f"{'-'.join(path) or 'bertsmith'}.md"
        pages[file] = f"# {title}\n\n```text\n{help_text(path)}\n```\n"
    return pages


def first_sentence(file: Path) -> str:
    """Return what a module says it is for: its docstring up to a full stop or a line's end."""
    docstring = ast.get_docstring(ast.parse(file.read_text(encoding="utf-8"))) or ""
    return docstring.partition("\n")[0].partition(". ")[0].rstrip(".").replace("``", "")


def tree() -> str:
    """Return the README's tree: each file of the package with what it is for."""
    lines = [("bertsmith/", first_sentence(ROOT / "bertsmith" / "__init__.py"))]

    def walk(folder: Path, depth: int) -> None:
        for path in sorted(folder.iterdir(), key=lambda path: (path.is_dir(), path.name)):
            indent = "  " * depth
            if path.suffix == ".py" and path.name != "__init__.py":
                lines.append((indent + path.name, first_sentence(path)))
            elif (path / "__init__.py").is_file():
                lines.append((f"{indent}{path.name}/", first_sentence(path / "__init__.py")))
                walk(path, depth + 1)

    walk(ROOT / "bertsmith", 1)
    lines += [(f"{folder}/", words) for folder, words in BESIDE.items()]
    width = max(len(name) for name, _ in lines) + 2
    return "```text\n" + "\n".join(f"{name:{width}}{words}" for name, words in lines) + "\n```"


def public_names() -> str:
    """Return the README's table of public names, each with its docstring's first line, unloaded."""
    rows = ["| name | what it is |", "| --- | --- |"]
    for name, module in sorted(bertsmith._PUBLIC.items()):  # noqa: SLF001 (its one reader)
        source = (ROOT / Path(*module.split("."))).with_suffix(".py").read_text(encoding="utf-8")
        kinds = (ast.ClassDef, ast.FunctionDef)
        nodes = [node for node in ast.parse(source).body if isinstance(node, kinds)]
        docstring = next(ast.get_docstring(node) or "" for node in nodes if node.name == name)
        summary = docstring.partition("\n")[0].replace("``", "`")
        rows.append(f"| `bertsmith.{name}` | {summary} |")
    return "\n".join(rows)


def results() -> str:
    """Return the table of docs/results.md from the rows' files, in the order of their command."""
    rows = ["| row | command | runs | held out |", "| --- | --- | --- | --- |"]
    known: dict[str, dict[str, Any]] = {}
    for file in sorted((ROOT / "benchmarks" / "results" / "tasks").glob("*.json")):
        row = json.loads(file.read_text(encoding="utf-8"))
        # The folds of a task are one row.
        whole, _, fold = row["name"].rpartition("-fold-")
        if whole in known:
            known[whole]["runs"] += row["runs"]
        else:
            command = row["command"].replace(f"heldout_fold={fold}", "heldout_fold=0 (to 4)")
            known[whole or row["name"]] = {**row, "command": command if whole else row["command"]}
    for name, row in known.items():
        figures = row["runs"][0]["figures"]
        # Further held-out files have their name before the metric's.
        shown = [one for metric in row["metrics"] for one in figures
                 if one == metric or one.endswith(f"_{metric}")]  # fmt: skip
        told = "; ".join(_spread(one, row["runs"]) for one in shown)
        made = f"`{row['command']}` ({row['date']})"
        rows.append(f"| {name} | {made} | {len(row['runs'])} | {told} |")
    return "\n".join(rows)


def trainer(machine: str) -> str:
    """Return the table of fine-tuning beside transformers' Trainer, a row for each task."""
    names = ("Bertsmith", "Trainer, its defaults", "Trainer, like lengths", "time by defaults",
             "time by like lengths")  # fmt: skip
    rows = [f"| task | settings | {' | '.join(names)} |", "| --- " * (2 + len(names)) + "|"]
    for file in sorted((ROOT / "benchmarks" / "results" / "finetune" / machine).glob("*.jsonl")):
        lines = [json.loads(line) for line in file.read_text(encoding="utf-8").splitlines()]
        runs = [
            [one for one in lines if one["name"] == name]
            for name in ("bertsmith", "transformers", "transformers, like lengths")
        ]
        if not runs[0]:
            continue
        metric = next(key for key in runs[0][0] if key in _METRICS)
        told = [_metric(metric, own) if own else "not run" for own in runs]
        ours = median(one["seconds"] for one in runs[0])
        ratios = " | ".join(_ratio(ours, own) for own in runs[1:])
        rows.append(
            f"| {runs[0][0]['task']} | {_settings(runs[0][0])} | {' | '.join(told)} | {ratios} |"
        )
    return "\n".join(rows)


def seeds() -> str:
    """Return the table of seeds beside those of the Trainer's defaults: metrics, no times."""
    rows = ["| task | settings | seeds | Bertsmith | Trainer, its defaults |", "| --- " * 5 + "|"]
    folder = ROOT / "benchmarks" / "results" / "finetune" / "seeds"
    for file in sorted(folder.glob("*.jsonl")):
        lines = [json.loads(line) for line in file.read_text(encoding="utf-8").splitlines()]
        peers = {one["seed"] for one in lines if one["name"] == "transformers"}
        both = [one for one in lines if one["seed"] in peers]
        metric = next(key for key in lines[0] if key in _METRICS)
        told = " | ".join(
            _spread(metric, [{"figures": one} for one in both if one["name"] == name])
            for name in ("bertsmith", "transformers")
        )
        rows.append(f"| {lines[0]['task']} | {_settings(lines[0])} | {len(peers)} | {told} |")
    return "\n".join(rows)


def _ratio(ours: float, theirs: list[dict[str, Any]]) -> str:
    return f"{ours / median(one['seconds'] for one in theirs):.2f}" if theirs else "not run"


def lab_tables() -> dict[str, str]:
    """Return the tables of each experiment that docs/lab.md shows, and its picture, by name."""
    given = (f"given-{name}" for name in _OF_ANY_MODEL)
    names = (*lab.EXPERIMENTS, *given)
    return {name: _lab_table("small", name) for name in names}


#: Experiments that docs/lab.md also shows of weights that were not made here.
_OF_ANY_MODEL = ("pooling", "context", "positions")


def _lab_table(folder: str, name: str) -> str:
    results = ROOT / "docs" / "lab" / folder
    table = results / f"{name}.md"
    if not table.exists():
        return "Not run at this scale yet."
    facts = json.loads((results / f"{name}.json").read_text(encoding="utf-8"))
    missing = len(facts["missing"])
    left = f", {missing} of them still missing" if missing else ""
    count = len(facts["stages"])
    made = f"{count} result{'s' * (count != 1)}{left}"
    head = f"{facts['question']} ({facts['source']}; {made})"
    picture = f"![{name}](lab/{folder}/{name}.png)"
    return f"{head}\n\n{table.read_text(encoding='utf-8').strip()}\n\n{picture}"


def _metric(metric: str, runs: list[dict[str, Any]]) -> str:
    """Return the metric and the seconds of some runs of a trainer."""
    known = [{"figures": one} for one in runs if metric in one]
    figure = _spread(metric, known) if known else "not scored"
    seeds = f", {len(runs)} seeds" if len(runs) > 1 else ""
    return f"{figure}; {median(one['seconds'] for one in runs):.0f} s{seeds}"


def _settings(run: dict[str, Any]) -> str:
    """Return the options of benchmarks/finetune.py that a run was made with."""
    told = [f"--epochs {run['epochs']:g}", f"--lr {run['lr']:g}"]
    told += [
        f"--{name} {run[name]}" for name in ("examples", "length", "train", "dev") if run[name]
    ]
    return f"`{' '.join(told)}`, {run['threads']} thread{'s' * (run['threads'] != 1)}"


#: The first metric of each task.
_METRICS = ("matthews", "spearman", "f1", "accuracy")


def _spread(metric: str, runs: list[dict[str, Any]]) -> str:
    """Return a metric's median over the runs, and its spread where there are several."""
    found = [run["figures"][metric] for run in runs]
    told = f"{metric} {median(found):.4f}"
    return told if len(found) == 1 else f"{told} ({min(found):.4f} to {max(found):.4f})"


def filled(text: str, name: str, content: str) -> str:
    """Return ``text`` with ``content`` between the two comments that carry ``name``."""
    begin, end = f"<!-- generated: {name} -->", f"<!-- end: {name} -->"
    if text.count(begin) != 1 or text.count(end) != 1:
        raise ValueError(f"expected one {begin} and one {end}")
    before, _, rest = text.partition(begin)
    return f"{before}{begin}\n{content}\n{end}{rest.partition(end)[2]}"


def wanted() -> dict[Path, str]:
    """Return every generated file with the content it should have."""
    readme = ROOT / "README.md"
    architecture = ROOT / "docs" / "architecture.md"
    table = ROOT / "docs" / "results.md"
    told = table.read_text(encoding="utf-8")
    made = {"results": results(), "seeds": seeds()}
    made |= {f"trainer, {machine}": trainer(machine) for machine in ("avx512", "avx2")}
    for name, content in made.items():
        told = filled(told, name, content)
    lab = ROOT / "docs" / "lab.md"
    shown = lab.read_text(encoding="utf-8")
    for name, content in lab_tables().items():
        shown = filled(shown, name, content)
    return {
        **help_pages(),
        lab: shown,
        readme: filled(readme.read_text(encoding="utf-8"), "public names", public_names()),
        architecture: filled(architecture.read_text(encoding="utf-8"), "tree", tree()),
        table: told,
    }


def main() -> int:
    """Write or check the generated documents; return the exit status."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--check", action="store_true", help="write nothing; fail on a difference")
    check = parser.parse_args().check
    os.environ.update(WIDTH)
    files = wanted()
    stale = set((ROOT / "docs" / "cli").glob("*.md")) - set(files)
    changed = [
        file
        for file, content in files.items()
        if not file.is_file() or file.read_text(encoding="utf-8") != content
    ]
    for file in sorted([*stale, *changed]):
        print(f"{'differs' if check else 'wrote'}: {file.relative_to(ROOT)}")
    if check:
        return 1 if stale or changed else 0
    for file in stale:
        file.unlink()
    for file in changed:
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(files[file], encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
