"""The stages that experiments are put together from, with the settings that a scale gives them.

It never makes one. Two experiments that ask for the same stage get the same one, by its hash.
"""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from bertsmith.lab.scale import Scale
from bertsmith.lab.sources import Sources, subsample_squad
from bertsmith.lab.stage import Stage, content_hash
from bertsmith.settings import merge_settings
from bertsmith.train.engine.settings import OptimSettings
from bertsmith.train.pretraining.recipes import recipe_defaults

#: Kinds of stages that train, of which it is a finding that one diverged.
TRAINING_KINDS = ("pretrain", "finetune")
#: Checkpoints that a pre-training run leaves, evenly on its way, and how many it may have while it
#: runs: each best evaluation is one as well.
NUM_SNAPSHOTS, _KEPT = 5, 30
#: The rate of fine-tuning a model that was given, the middle of the paper's (appendix A.3).
_GIVEN_RATE = 3e-5


@dataclass(frozen=True)
class StageFactory:
    """A scale and the sources. ``work``: where cut files of tasks are written."""

    scale: Scale
    sources: Sources
    work_dir: Path

    @property
    def learning_rate(self) -> float:
        """The recipe's peak learning rate for the usual model."""
        said = recipe_defaults(self.scale.recipe, self.scale.model_settings()).get("optim", {})
        return OptimSettings.parse(said, "the recipe").lr

    def text_stage(self, language: str = "en") -> Stage:
        """Return the stage that cuts a language's text to the scale's size."""
        return Stage("text", {"characters": self.scale.max_characters}, {},
                    self.sources.text_files(language))  # fmt: skip

    def vocabulary_stage(
        self, language: str = "en", size: int | None = None, segment: str | None = None
    ) -> Stage:
        """Return the stage that learns a vocabulary."""
        settings = {"size": size or self.scale.vocab_size, "segment": segment}
        return Stage("words", settings, {"text": self.text_stage(language)})

    def store_stage(
        self, language: str = "en", size: int | None = None, segment: str | None = None
    ) -> Stage:
        """Return the stage that tokenizes a language's text."""
        needs = {
            "text": self.text_stage(language),
            "words": self.vocabulary_stage(language, size, segment),
        }
        return Stage("store", {"language": language, "held_out": 0.05}, needs)

    def pretraining_run(
        self,
        seed: int = 0,
        *,
        store: Stage | None = None,
        steps: int | None = None,
        model: dict[str, Any] | None = None,
        **values: Any,
    ) -> Stage:
        """Return a pre-training run with both of the paper's tasks.

        values: tables of settings that differ.
        """
        scale, count = self.scale, steps or self.scale.num_steps
        sizes = scale.model_settings(**(model or {}))
        usual: dict[str, Any] = {
            "steps": count,
            "recipe": scale.recipe,
            "data": {"length": scale.max_length, "batch": scale.batch_size},
            "run": {"seed": seed, "eval_sequences": scale.num_eval_sequences},
            "checkpoint": {"every": max(1, count // NUM_SNAPSHOTS), "keep": _KEPT},
        }
        # Written out, so that a recipe that has changed is another run.
        whole = merge_settings(recipe_defaults(scale.recipe, sizes), usual)
        return Stage(
            "pretrain", merge_settings(whole, values), {"store": store or self.store_stage()}
        )

    def baseline_run(self, seed: int = 0, **values: Any) -> Stage:
        """Return the run that most experiments start from, with or without next sentence.

        It is the paper's where a scale is large enough to learn it for certain. First weights and
        rate are the same with and without, so that nothing else differs.
        """
        run = self.pretraining_run if self.scale.nsp else self.mlm_only_run
        return run(seed, **values)

    def mlm_only_run(self, seed: int = 0, **values: Any) -> Stage:
        """Return a run without next sentence, for comparing losses of words.

        Of two runs the one that learns next sentence pays for it in words, and a small difference
        decides whether it does.
        """
        return self.pretraining_run(seed, **merge_settings({"data": {"nsp": False}}, values))

    def left_to_right_run(self, seed: int = 0, **values: Any) -> Stage:
        """Return a run that sees what stands before a word only, and predicts the next one."""
        return self.pretraining_run(
            seed, model={"attention": "causal"},
            **merge_settings({"data": {"nsp": False, "objective": "left-to-right"}}, values),
        )  # fmt: skip

    def initialized_model(self, run: Stage) -> Stage:
        """Return the model that a run begins with: what a task owes to no pre-training."""
        settings = {name: run.settings[name] for name in ("recipe", "model", "data", "run")}
        return Stage("begun", settings, {"store": run.dependencies["store"]})

    def snapshots(self, run: Stage) -> dict[int, Stage]:
        """Return the model of a run at each of its moments, by the step; the last is its own.

        The usual run and those beside it all have them, so that it is one run for all experiments.
        """
        every, last = run.settings["checkpoint"]["every"], run.settings["steps"]
        found = {step: Stage("snapshot", {"step": step}, {"run": run})
                 for step in range(every, last, every)}  # fmt: skip
        return {**found, last: run}

    def finetuning_run(self, model: Stage | None, task: str, seed: int = 0, **values: Any) -> Stage:
        """Return a fine-tuning of a stage's model, or of the model that was given, on a task."""
        scale = self.scale
        examples = scale.max_squad_examples if task == "squad" else scale.max_train_examples
        usual: dict[str, Any] = {
            "task": {"batch": scale.finetune_batch_size, "examples": examples},
            "optim": {"lr": scale.finetune_lr},
            "schedule": {"epochs": scale.epochs},
            "run": {"seed": seed},
            # A fine-tuning of minutes is made anew if it is stopped.
            "checkpoint": {"every": 10**9},
        }
        if scale.name == "smoke":
            usual["task"] |= {"length": scale.max_positions}
            if task == "squad":
                usual["task"] |= {"stride": 16, "max_question_length": 16}
        if model is None and "features" not in values:
            # What suits a small model spoils a large one.
            usual["optim"] = {"lr": _GIVEN_RATE}
        train, dev = self._files(task)
        files = {"train": train, "dev": dev}
        if model is None:
            files["model"] = Path(str(self.sources.model))
        settings = {"task": task, "values": merge_settings(usual, values)}
        return Stage("finetune", settings, {} if model is None else {"model": model}, files)

    def _files(self, task: str) -> tuple[Path, Path]:
        train, dev = self.sources.task_files(task)
        if task == "squad" and self.scale.squad_article_step > 1:
            train, dev = (self._cut(file) for file in (train, dev))
        return train, dev

    def _cut(self, file: Path) -> Path:
        """Return a file of SQuAD with some of its articles, from all over it."""
        every = self.scale.squad_article_step
        cut = self.work_dir / "tasks" / f"{file.stem}-{content_hash(file)[:8]}-every-{every}.json"
        return cut if cut.exists() else subsample_squad(file, every, cut)


#: The metric of each task, and its name in a table: the paper's tables 5 and 6 have accuracy for
#: MRPC, where GLUE has F1 as well.
TASK_METRICS = {
    "mrpc": ("accuracy", "MRPC, accuracy"), "sts-b": ("spearman", "STS-B, Spearman"),
    "sst-2": ("accuracy", "SST-2, accuracy"), "squad": ("f1", "SQuAD, F1"),
    "conll2003": ("f1", "CoNLL-2003, F1"),
}  # fmt: skip


def task_score(result: dict[str, Any] | None, task: str) -> float | None:
    """Return a fine-tuning's metric; NaN where it has none or diverged, None without a result."""
    if result is None:
        return None
    found = None if "diverged" in result else result["figures"][TASK_METRICS[task][0]]
    return float("nan") if found is None else float(found)


def validation_metric(result: dict[str, Any] | None, name: str = "masked_lm") -> float | None:
    """Return a held-out figure of a run; NaN where it diverged, None without a result."""
    if result is None:
        return None
    # What is not finite is null in a file.
    found = None if "diverged" in result else result["heldout"].get(name)
    return float("nan") if found is None else float(found)
