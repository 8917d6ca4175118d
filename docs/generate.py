"""Regenerate the help pages and tables in the documentation.

With ``--check``, write nothing and exit with status 1 if a file is out of date.
"""

import argparse
import ast
import inspect
import io
import json
import os
import re
import sys
from collections.abc import Iterator
from contextlib import redirect_stdout
from pathlib import Path
from statistics import median
from typing import Any

from pydantic_core import PydanticUndefined
from typer.main import get_command

import bertsmith
from bertsmith.cli import commands as registered_commands  # noqa: F401
from bertsmith.cli import lab
from bertsmith.cli.app import app
from bertsmith.data.settings import DataSettings
from bertsmith.model.config import BiLSTMSettings, ModelConfig
from bertsmith.plurals import count_noun
from bertsmith.serve.settings import ServeSettings
from bertsmith.settings import Settings
from bertsmith.tasks.embedding_settings import EmbeddingSettings, TextColumns
from bertsmith.tasks.reranking_settings import RerankingSettings
from bertsmith.tasks.settings import TaskSettings
from bertsmith.train.distillation.settings import DistillSettings
from bertsmith.train.engine.schedule import ScheduleSettings
from bertsmith.train.engine.settings import CheckpointSettings, FinetuneRunSettings, OptimSettings
from bertsmith.train.finetuning.settings import TaskRunSettings
from bertsmith.train.pretraining.recipes import RunSettings
from bertsmith.train.pretraining.schedule import PretrainScheduleSettings

ROOT = Path(__file__).resolve().parent.parent
#: Environment that makes help pages independent of the terminal.
TERMINAL_ENVIRONMENT = {"COLUMNS": "80", "NO_COLOR": "1", "TERM": "dumb"}
#: Settings tables of docs/reference/settings.md: title, prefix of ``--set`` and class.
SETTINGS_TABLES: tuple[tuple[str, str, type[Settings]], ...] = (
    ("Model", "model", ModelConfig),
    ("Training examples", "data", DataSettings),
    ("Optimizer", "optim", OptimSettings),
    ("Schedule", "schedule", ScheduleSettings),
    ("Schedule of a pre-training run", "schedule", PretrainScheduleSettings),
    ("Checkpoints", "checkpoint", CheckpointSettings),
    ("Pre-training run", "run", RunSettings),
    ("Fine-tuning run", "run", FinetuneRunSettings),
    ("Fine-tuning run on a task", "run", TaskRunSettings),
    ("Fine-tuning task", "task", TaskSettings),
    ("Embedding model", "embedding", EmbeddingSettings),
    ("Columns of an embedding model's tables", "embedding.columns", TextColumns),
    ("Reranker", "reranking", RerankingSettings),
    ("Distillation", "distill", DistillSettings),
    ("Fine-tuning on frozen features", "features", BiLSTMSettings),
    ("Server limits", "serve", ServeSettings),
)
#: The primary metric of each task.
PRIMARY_METRICS = ("matthews", "spearman", "f1", "accuracy")
#: Experiments that docs/lab.md also shows for models that were not trained with Bertsmith.
EXPERIMENTS_AT_MEDIUM = ("pretraining-tasks", "model-size", "training-steps")
EXPERIMENTS_ON_EXTERNAL_MODELS = ("pooling", "context", "positions")


def iterate_commands(
    command: Any, path: tuple[str, ...] = ()
) -> Iterator[tuple[tuple[str, ...], Any]]:
    """Yield the path and object of each command, groups first; ``()`` is the program."""
    yield path, command
    for name, member in getattr(command, "commands", {}).items():
        yield from iterate_commands(member, (*path, name))


def render_help(path: tuple[str, ...]) -> str:
    """Return the output of ``bertsmith PATH --help`` on a terminal of 80 columns."""
    # typer's test runner sets its own width, two columns wider than a terminal's.
    output = io.StringIO()
    with redirect_stdout(output):
        get_command(app).main([*path, "--help"], prog_name="bertsmith", standalone_mode=False)
    return "\n".join(line.rstrip() for line in output.getvalue().strip("\n").splitlines())


def render_help_pages() -> dict[Path, str]:
    """Return the help page of each command and of the program, keyed by file."""
    pages = {}
    for path, _ in iterate_commands(get_command(app)):
        title = " ".join(("bertsmith", *path))
        file = ROOT / "docs" / "cli" / f"{'-'.join(path) or 'bertsmith'}.md"
        pages[file] = f"# {title}\n\n```text\n{render_help(path)}\n```\n"
    return pages


def read_summary(file: Path) -> str:
    """Return the first sentence of a module's docstring, without the final period."""
    docstring = ast.get_docstring(ast.parse(file.read_text(encoding="utf-8"))) or ""
    return docstring.partition("\n")[0].partition(". ")[0].rstrip(".").replace("``", "")


def render_modules() -> str:
    """Return a section for each package, with a table of its modules and their descriptions."""
    sections = []
    for file in sorted((ROOT / "bertsmith").rglob("__init__.py")):
        folder = file.parent
        modules = sorted(path for path in folder.glob("*.py") if path != file)
        if not modules:
            continue
        rows = [f"| `{path.name}` | {read_summary(path)} |" for path in modules]
        table = "\n".join(["| module | description |", "| --- | --- |", *rows])
        title = folder.relative_to(ROOT).as_posix()
        sections.append(f"### {title}\n\n{read_summary(file)}.\n\n{table}")
    return "\n\n".join(sections)


def read_public_definitions() -> dict[str, ast.ClassDef | ast.FunctionDef]:
    """Return the definition of each public name, without importing its module."""
    public_definitions = {}
    for name, module in sorted(bertsmith._MODULE_OF_NAME.items()):  # noqa: SLF001
        source = (ROOT / Path(*module.split("."))).with_suffix(".py").read_text(encoding="utf-8")
        definitions = [
            node
            for node in ast.parse(source).body
            if isinstance(node, ast.ClassDef | ast.FunctionDef)
        ]
        # The last definition of an overloaded function has the docstring.
        public_definitions[name] = [node for node in definitions if node.name == name][-1]
    return public_definitions


def format_signature(definition: ast.ClassDef | ast.FunctionDef) -> str:
    """Return a function with its arguments, their defaults and its return type, or a class name."""
    if isinstance(definition, ast.ClassDef):
        return definition.name
    arguments = definition.args
    named = [*arguments.posonlyargs, *arguments.args, *arguments.kwonlyargs]
    for argument in (*named, arguments.vararg, arguments.kwarg):
        if argument is not None:
            argument.annotation = None
    result = f" -> {ast.unparse(definition.returns)}" if definition.returns else ""
    return f"{definition.name}({ast.unparse(arguments)}){result}"


def render_public_names() -> str:
    """Return a table of the public names with their signatures and docstring summaries."""
    rows = ["| name | description |", "| --- | --- |"]
    for definition in read_public_definitions().values():
        docstring = ast.get_docstring(definition) or ""
        summary = docstring.partition("\n")[0].replace("``", "`")
        signature = format_signature(definition).replace("|", "\\|")
        rows.append(f"| `bertsmith.{signature}` | {summary} |")
    return "\n".join(rows)


def render_public_objects() -> str:
    """Return one mkdocstrings directive per public name."""
    names = sorted(bertsmith._MODULE_OF_NAME.items())  # noqa: SLF001
    return "\n\n".join(f"::: {module}.{name}" for name, module in names)


def render_command_table() -> str:
    """Return a table of all commands that links to their help pages."""
    rows = ["| command | description |", "| --- | --- |"]
    for path, command in iterate_commands(get_command(app)):
        if path and not getattr(command, "commands", {}):
            summary = inspect.cleandoc(command.help or "").partition("\n")[0]
            page = f"../cli/{'-'.join(path)}.md"
            rows.append(f"| [`bertsmith {' '.join(path)}`]({page}) | {summary} |")
    return "\n".join(rows)


def render_settings() -> str:
    """Return a table of each settings class: its keys, defaults and descriptions."""
    sections = []
    for title, table, settings in SETTINGS_TABLES:
        rows = ["| key | default | description |", "| --- | --- | --- |"]
        descriptions = read_field_descriptions(settings)
        inherited = {
            name for base in settings.__bases__ for name in getattr(base, "model_fields", ())
        }
        for name, field in settings.model_fields.items():
            if name in inherited:
                continue
            default = field.get_default(call_default_factory=True)
            if isinstance(default, Settings):
                # A nested table has a section of its own.
                continue
            if default is PydanticUndefined:
                default_text = "required"
            elif default is None:
                default_text = "none"
            elif isinstance(default, bool):
                default_text = f"`{str(default).lower()}`"
            else:
                default_text = f"`{json.dumps(default)}`"
            rows.append(f"| `{table}.{name}` | {default_text} | {descriptions.get(name, '')} |")
        sections.append(f"## {title}\n\n" + "\n".join(rows))
    return "\n\n".join(sections)


def read_field_descriptions(settings: type[Settings]) -> dict[str, str]:
    """Return the description of each field: its ``#:`` comment or its entry in the docstring."""
    entries = re.split(r"^    (\w+): ", inspect.getdoc(settings) or "", flags=re.MULTILINE)[1:]
    descriptions = dict(zip(entries[::2], entries[1::2], strict=True))
    comment: list[str] = []
    for line in inspect.getsource(settings).splitlines():
        if match := re.match(r"    #: ?(.*)", line):
            comment.append(match[1])
        elif match := re.match(r"    (\w+): ", line):
            descriptions.setdefault(match[1], " ".join(comment))
            comment = []
        else:
            comment = []
    return {
        name: " ".join(text.split()).replace("``", "`").replace("|", "\\|")
        for name, text in descriptions.items()
    }


def render_task_results() -> str:
    """Return the table of fine-tuning results, one row for each task file."""
    table = ["| row | command | runs | held out |", "| --- | --- | --- | --- |"]
    rows: dict[str, dict[str, Any]] = {}
    for file in sorted((ROOT / "benchmarks" / "results" / "tasks").glob("*.json")):
        row = json.loads(file.read_text(encoding="utf-8"))
        # The cross-validation folds of a task share one row.
        task, _, fold = row["name"].rpartition("-fold-")
        if task in rows:
            rows[task]["runs"] += row["runs"]
        else:
            command = row["command"].replace(f"validation_fold={fold}", "validation_fold=0 (to 4)")
            rows[task or row["name"]] = {**row, "command": command if task else row["command"]}
    for name, row in rows.items():
        # Metrics of additional held-out files are prefixed with the file's name.
        metrics = [
            key
            for metric in row["metric_names"]
            for key in row["runs"][0]["metrics"]
            if key == metric or key.endswith(f"_{metric}")
        ]
        scores = "; ".join(format_metric_range(metric, row["runs"]) for metric in metrics)
        command = f"`{row['command']}` ({row['date']})"
        table.append(f"| {name} | {command} | {len(row['runs'])} | {scores} |")
    return "\n".join(table)


def render_trainer_comparison(machine: str) -> str:
    """Return the table comparing fine-tuning with transformers' Trainer, one row for each task."""
    columns = ("Bertsmith", "Trainer, defaults", "Trainer, grouped",
               "time ratio to defaults", "time ratio to grouped")  # fmt: skip
    table = [f"| task | settings | {' | '.join(columns)} |", "| --- " * (2 + len(columns)) + "|"]
    for file in sorted((ROOT / "benchmarks" / "results" / "finetune" / machine).glob("*.jsonl")):
        runs = [json.loads(line) for line in file.read_text(encoding="utf-8").splitlines()]
        runs_by_trainer = [
            [run for run in runs if run["name"] == name]
            for name in ("bertsmith", "transformers", "transformers, like lengths")
        ]
        bertsmith_runs, *peer_runs = runs_by_trainer
        if not bertsmith_runs:
            continue
        first = bertsmith_runs[0]
        metric = next(key for key in first if key in PRIMARY_METRICS)
        scores = [
            format_score_and_seconds(metric, group) if group else "not run"
            for group in runs_by_trainer
        ]
        seconds = median(run["seconds"] for run in bertsmith_runs)
        ratios = " | ".join(format_time_ratio(seconds, group) for group in peer_runs)
        table.append(
            f"| {first['task']} | {format_settings(first)} | {' | '.join(scores)} | {ratios} |"
        )
    return "\n".join(table)


def render_seed_comparison() -> str:
    """Return the table comparing metrics over seeds with those of the Trainer's defaults."""
    table = ["| task | settings | seeds | Bertsmith | Trainer, defaults |", "| --- " * 5 + "|"]
    folder = ROOT / "benchmarks" / "results" / "finetune" / "seeds"
    for file in sorted(folder.glob("*.jsonl")):
        runs = [json.loads(line) for line in file.read_text(encoding="utf-8").splitlines()]
        seeds = {run["seed"] for run in runs if run["name"] == "transformers"}
        metric = next(key for key in runs[0] if key in PRIMARY_METRICS)
        scores = " | ".join(
            format_metric_range(
                metric,
                [{"metrics": run} for run in runs if run["seed"] in seeds and run["name"] == name],
            )
            for name in ("bertsmith", "transformers")
        )
        first = runs[0]
        table.append(f"| {first['task']} | {format_settings(first)} | {len(seeds)} | {scores} |")
    return "\n".join(table)


def render_lab_tables() -> dict[str, str]:
    """Return the section of each experiment in docs/lab.md, keyed by name."""
    external = (f"external-{name}" for name in EXPERIMENTS_ON_EXTERNAL_MODELS)
    small = {name: render_lab_table("small", name) for name in (*lab.EXPERIMENTS, *external)}
    medium = {f"medium, {name}": render_lab_table("medium", name) for name in EXPERIMENTS_AT_MEDIUM}
    return small | medium


def render_lab_table(scale: str, name: str) -> str:
    """Return an experiment's verdict, question, results table and plot as Markdown."""
    folder = ROOT / "docs" / "lab" / scale
    table = folder / f"{name}.md"
    if not table.exists():
        return "Not finished at this scale yet."
    report = json.loads((folder / f"{name}.json").read_text(encoding="utf-8"))
    num_missing, num_stages = len(report["missing"]), len(report["stages"])
    missing = f", {num_missing} of them still missing" if num_missing else ""
    num_results = f"{count_noun(num_stages, 'result')}{missing}"
    if not name.startswith("external-"):
        num_results += f", {count_noun(report['seeds'], 'seed')}"
    heading = f"{report['question']} ({report['source']}; {num_results})"
    plot = f"![{name}](lab/{scale}/{name}.png)"
    tables = table.read_text(encoding="utf-8").strip()
    if "verdict" in report:
        # The page starts with the verdict and a list of claims.
        verdict, claims, tables = tables.split("\n\n", 2)
        heading = f"{verdict}\n\n{heading}\n\n{claims}"
    return f"{heading}\n\n{tables}\n\n{plot}"


def format_time_ratio(seconds: float, peer_runs: list[dict[str, Any]]) -> str:
    """Return ``seconds`` divided by the median time of ``peer_runs``."""
    return (
        f"{seconds / median(run['seconds'] for run in peer_runs):.2f}" if peer_runs else "not run"
    )


def format_score_and_seconds(metric: str, runs: list[dict[str, Any]]) -> str:
    """Return the metric and the median time of a trainer's runs."""
    scored = [{"metrics": run} for run in runs if metric in run]
    score = format_metric_range(metric, scored) if scored else "not scored"
    seeds = f", {len(runs)} seeds" if len(runs) > 1 else ""
    return f"{score}; {median(run['seconds'] for run in runs):.0f} s{seeds}"


def format_settings(run: dict[str, Any]) -> str:
    """Return the options of benchmarks/finetune.py that a run used."""
    options = [f"--epochs {run['epochs']:g}", f"--lr {run['lr']:g}"]
    options += [
        f"--{name} {run[name]}" for name in ("examples", "length", "train", "dev") if run[name]
    ]
    return f"`{' '.join(options)}`, {count_noun(run['threads'], 'thread')}"


def format_metric_range(metric: str, runs: list[dict[str, Any]]) -> str:
    """Return a metric's median over the runs, followed by its range if there are several."""
    values = [run["metrics"][metric] for run in runs]
    score = f"{metric} {median(values):.4f}"
    return score if len(values) == 1 else f"{score} ({min(values):.4f} to {max(values):.4f})"


def replace_section(text: str, name: str, content: str) -> str:
    """Return ``text`` with ``content`` between the marker comments of section ``name``."""
    start, end = f"<!-- generated: {name} -->", f"<!-- end: {name} -->"
    if text.count(start) != 1 or text.count(end) != 1:
        raise ValueError(f"section {name!r} is not marked once: expected one {start} and one {end}")
    before, _, remainder = text.partition(start)
    return f"{before}{start}\n{content}\n{end}{remainder.partition(end)[2]}"


def replace_sections(file: Path, sections: dict[str, str]) -> str:
    """Return the content of ``file`` with its generated sections replaced."""
    text = file.read_text(encoding="utf-8")
    for name, content in sections.items():
        text = replace_section(text, name, content)
    return text


def render_files() -> dict[Path, str]:
    """Return the expected content of each generated file."""
    task_sections = {"results": render_task_results(), "seeds": render_seed_comparison()}
    for machine in ("avx512", "avx2"):
        task_sections[f"trainer, {machine}"] = render_trainer_comparison(machine)
    sections = {
        ROOT / "docs" / "reference" / "cli.md": {"commands": render_command_table()},
        ROOT / "docs" / "reference" / "python.md": {
            "public names": render_public_names(),
            "public objects": render_public_objects(),
        },
        ROOT / "docs" / "reference" / "settings.md": {"settings": render_settings()},
        ROOT / "docs" / "architecture.md": {"modules": render_modules()},
        ROOT / "docs" / "results.md": task_sections,
        ROOT / "docs" / "lab.md": render_lab_tables(),
    }
    pages = render_help_pages()
    return pages | {file: replace_sections(file, content) for file, content in sections.items()}


def main() -> int:
    """Write or check the generated files; return the exit status."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument(
        "--check", action="store_true", help="write nothing; fail if a file is out of date"
    )
    is_check = parser.parse_args().check
    os.environ.update(TERMINAL_ENVIRONMENT)
    files = render_files()
    obsolete = set((ROOT / "docs" / "cli").glob("*.md")) - set(files)
    changed = [
        file
        for file, content in files.items()
        if not file.is_file() or file.read_text(encoding="utf-8") != content
    ]
    for file in sorted([*obsolete, *changed]):
        print(f"{'differs' if is_check else 'wrote'}: {file.relative_to(ROOT)}")
    if is_check:
        return 1 if obsolete or changed else 0
    for file in obsolete:
        file.unlink()
    for file in changed:
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(files[file], encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
