"""Creates the stages of experiments, with the settings of a scale.

Stages are identified by a hash of their settings, so experiments that create equal stages share
their results.
"""

from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, NamedTuple

from bertsmith.lab.recipe import get_experiment_settings
from bertsmith.lab.scale import Scale
from bertsmith.lab.sources import Sources, subsample_squad
from bertsmith.lab.stage import Stage, hash_content
from bertsmith.settings import merge_settings
from bertsmith.train.engine.settings import OptimSettings

#: Labels of models without pre-training. With structured initialization, the default of the recipe
#: "fast", some attention heads initially attend to neighboring tokens, and some to equal words in
#: the other segment.
RANDOM: Final = "not pre-trained, random initialization"
STRUCTURED: Final = "not pre-trained, structured initialization"
INITIALIZED: Final = "not pre-trained, initialization of the runs"
#: Kinds of stages that train. A training run that diverges has a result and is not a failure.
TRAINING_KINDS = ("pretrain", "finetune")
#: Maximum number of checkpoints that a run keeps, including those of evaluations with a new best
#: loss.
_MAX_CHECKPOINTS = 30
#: Learning rate for fine-tuning an external model, the middle of the paper's range (appendix A.3).
_EXTERNAL_MODEL_LR = 3e-5


@dataclass(frozen=True)
class StageFactory:
    """Creates stages for a scale and its sources.

    Attributes:
        scale: The sizes of models, training runs and evaluations.
        sources: The input files.
        work_dir: The directory of subsampled task files.
    """

    scale: Scale
    sources: Sources
    work_dir: Path

    @property
    def learning_rate(self) -> float:
        """The peak learning rate of the recipe for the baseline model."""
        model = self.scale.build_model_settings()
        settings = get_experiment_settings(self.scale.recipe, model).get("optim", {})
        return OptimSettings.parse(settings, "the recipe").lr

    def create_text_stage(self, language: str = "en") -> Stage:
        """Return the stage that samples the text of a language, "en" or "ko"."""
        return Stage(
            "text",
            {"max_characters": self.scale.max_characters},
            {},
            self.sources.find_text_files(language),
        )

    def create_vocabulary_stage(
        self, language: str = "en", size: int | None = None, segment: str | None = None
    ) -> Stage:
        """Return the stage that learns a vocabulary.

        Args:
            language: The language of the text, "en" or "ko".
            size: The vocabulary size, by default that of the scale.
            segment: The name of a morpheme segmenter that runs before WordPiece, None without.
        """
        settings = {"size": size or self.scale.vocab_size, "segment": segment}
        return Stage("vocabulary", settings, {"text": self.create_text_stage(language)})

    def create_store_stage(
        self, language: str = "en", size: int | None = None, segment: str | None = None
    ) -> Stage:
        """Return the stage that builds a token store; see ``create_vocabulary_stage``."""
        dependencies = {
            "text": self.create_text_stage(language),
            "vocabulary": self.create_vocabulary_stage(language, size, segment),
        }
        return Stage("store", {"language": language, "held_out": 0.05}, dependencies)

    def create_pretraining_run(
        self,
        seed: int = 0,
        *,
        store: Stage | None = None,
        steps: int | None = None,
        model: dict[str, Any] | None = None,
        **overrides: Any,
    ) -> Stage:
        """Return a pre-training run with masked LM and next-sentence prediction.

        Args:
            seed: The random seed.
            store: The store stage, by default the English one.
            steps: The number of steps, by default that of the scale.
            model: Model settings that differ from the baseline model.
            overrides: Other settings that differ from the baseline, by section.
        """
        scale = self.scale
        num_steps = steps or scale.num_steps
        model_settings = scale.build_model_settings(**(model or {}))
        settings: dict[str, Any] = {
            "steps": num_steps,
            "recipe": scale.recipe,
            "data": {"max_seqlen": scale.max_length, "batch_size": scale.batch_size},
            "run": {"seed": seed, "max_eval_sequences": scale.num_eval_sequences},
            "checkpoint": {
                "steps": max(1, num_steps // scale.num_snapshots),
                "keep": _MAX_CHECKPOINTS,
            },
        }
        if scale.initialization is not None:
            settings["run"]["initialization"] = scale.initialization
        if scale.neighbor_bias_steps:
            settings["schedule"] = {"neighbor_bias_steps": scale.neighbor_bias_steps}
        if scale.optimizer is not None:
            settings["optim"] = {"optimizer": scale.optimizer}
        # The settings of the recipe are part of the stage's key, so that results are not reused
        # after the recipe has changed.
        settings = merge_settings(get_experiment_settings(scale.recipe, model_settings), settings)
        dependencies = {"store": store or self.create_store_stage()}
        return Stage("pretrain", merge_settings(settings, overrides), dependencies)

    def create_baseline_run(self, seed: int = 0, **overrides: Any) -> Stage:
        """Return the pre-training run that most experiments compare with or fine-tune.

        The run has next-sentence prediction only at scales at which models reliably learn it. Its
        initialization and learning rate are the same with and without next-sentence prediction.
        See ``create_pretraining_run``.
        """
        create_run = self.create_pretraining_run if self.scale.nsp else self.create_mlm_only_run
        return create_run(seed, **overrides)

    def create_mlm_only_run(self, seed: int = 0, **overrides: Any) -> Stage:
        """Return a pre-training run with masked LM only; see ``create_pretraining_run``.

        Experiments that compare MLM losses use such runs. Next-sentence prediction increases the
        MLM loss if it is learned, and small differences decide whether a short run learns it.
        """
        return self.create_pretraining_run(
            seed, **merge_settings({"data": {"nsp": False}}, overrides)
        )

    def create_left_to_right_run(self, seed: int = 0, **overrides: Any) -> Stage:
        """Return a pre-training run with causal attention that predicts the next token."""
        settings: dict[str, Any] = {"data": {"nsp": False, "objective": "left-to-right"}}
        if self.scale.neighbor_bias_steps:
            settings["schedule"] = {"neighbor_bias_steps": 0}
        return self.create_pretraining_run(
            seed, model={"attention": "causal"}, **merge_settings(settings, overrides)
        )

    def create_initialized_model(self, run: Stage) -> Stage:
        """Return the stage that initializes the model of a run, without pre-training it."""
        settings = {name: run.settings[name] for name in ("recipe", "model", "data", "run")}
        return Stage("initialized-model", settings, {"store": run.dependencies["store"]})

    def create_untrained_models(self, run: Stage) -> dict[str, Stage]:
        """Return models like that of a run without pre-training, by the kind of initialization.

        These are a randomly initialized model and, if the run has another initialization, a model
        with that one: STRUCTURED if it sets attention heads by hand, else INITIALIZED.
        """
        initialization = run.settings["run"].get("initialization", "random")
        # Where random is the default, it is not part of the settings.
        changes = {} if initialization == "random" else {"run": {"initialization": "random"}}
        random_run = Stage("pretrain", merge_settings(run.settings, changes), run.dependencies)
        models = {RANDOM: self.create_initialized_model(random_run)}
        if initialization != "random":
            name = STRUCTURED if initialization.endswith("-heads") else INITIALIZED
            models[name] = self.create_initialized_model(run)
        return models

    def create_snapshots(self, run: Stage) -> dict[int, Stage]:
        """Return the models of a run's evenly spaced checkpoints, by step.

        The model of the last step is the run itself. All runs keep these checkpoints, so that
        experiments with and without snapshots can share a run.
        """
        interval = run.settings["checkpoint"]["steps"]
        last_step = run.settings["steps"]
        stages = {
            step: Stage("snapshot", {"step": step}, {"run": run})
            for step in range(interval, last_step, interval)
        }
        stages[last_step] = run
        return stages

    def create_finetuning_run(
        self, model: Stage | None, task: str, seed: int = 0, **overrides: Any
    ) -> Stage:
        """Return a fine-tuning run.

        Args:
            model: The stage whose model is fine-tuned, None for the user's model.
            task: The name of a public task, such as "mrpc".
            seed: The random seed.
            overrides: Fine-tuning settings that differ from those of the scale, by section.
        """
        scale = self.scale
        max_examples = scale.max_squad_examples if task == "squad" else scale.max_train_examples
        values: dict[str, Any] = {
            "task": {"batch_size": scale.finetune_batch_size, "max_train_examples": max_examples},
            "optim": {"lr": scale.finetune_lr},
            "schedule": {"epochs": scale.epochs},
            "run": {"seed": seed},
            # Fine-tuning takes only minutes, so no checkpoints are saved, and an interrupted run
            # starts again.
            "checkpoint": {"steps": 10**9},
        }
        if scale.name == "smoke":
            values["task"] |= {"max_seqlen": scale.max_positions}
            if task == "squad":
                values["task"] |= {"window_stride": 16, "max_question_length": 16}
        if model is None and "features" not in overrides:
            # The scale's learning rate is for its small model and too high for larger ones.
            values["optim"] = {"lr": _EXTERNAL_MODEL_LR}
        train, dev = self._find_task_files(task)
        files = {"train": train, "dev": dev}
        dependencies = {}
        if model is not None:
            dependencies["model"] = model
        else:
            assert self.sources.model is not None
            files["model"] = Path(self.sources.model)
        settings = {"task": task, "values": merge_settings(values, overrides)}
        return Stage("finetune", settings, dependencies, files)

    def _find_task_files(self, task: str) -> tuple[Path, Path]:
        """Return the training file and the validation file of a task.

        The files of SQuAD are subsampled if the scale requires it.
        """
        train, dev = self.sources.find_task_files(task)
        if task == "squad" and self.scale.squad_article_step > 1:
            train, dev = (self._ensure_subsampled_squad(file) for file in (train, dev))
        return train, dev

    def _ensure_subsampled_squad(self, file: Path) -> Path:
        """Return a file with every n-th article of a SQuAD file; write it if it does not exist."""
        step = self.scale.squad_article_step
        name = f"{file.stem}-{hash_content(file)[:8]}-every-{step}.json"
        path = self.work_dir / "tasks" / name
        return path if path.exists() else subsample_squad(file, step, path)


class TaskMetric(NamedTuple):
    """The reported metric of a task.

    Attributes:
        name: The metric's name in the results of fine-tuning.
        task_label: The task's name in tables and plots.
        metric_label: The metric's name in tables and plots.
    """

    name: str
    task_label: str
    metric_label: str

    @property
    def label(self) -> str:
        """Task and metric, such as "SQuAD, F1"."""
        return f"{self.task_label}, {self.metric_label}"


#: The reported metric of each task. For MRPC it is accuracy, as in tables 5 and 6 of the paper.
TASK_METRICS = {
    "mrpc": TaskMetric("accuracy", "MRPC", "accuracy"),
    "sts-b": TaskMetric("spearman", "STS-B", "Spearman"),
    "sst-2": TaskMetric("accuracy", "SST-2", "accuracy"),
    "squad": TaskMetric("f1", "SQuAD", "F1"),
    "conll2003": TaskMetric("f1", "CoNLL-2003", "F1"),
}


def get_task_score(result: dict[str, Any] | None, task: str) -> float | None:
    """Return the metric of a fine-tuning run's result.

    Returns:
        None without a result. NaN if the run diverged or the metric is undefined.
    """
    if result is None:
        return None
    value = None if "diverged" in result else result["metrics"][TASK_METRICS[task].name]
    return float("nan") if value is None else float(value)


def get_heldout_metric(result: dict[str, Any] | None, name: str = "mlm_loss") -> float | None:
    """Return a held-out metric of a pre-training run's result, by default the MLM loss.

    Returns:
        None without a result. NaN if the run diverged or the value is not finite.
    """
    if result is None:
        return None
    # Values that are not finite are null in JSON.
    value = None if "diverged" in result else result["heldout_metrics"].get(name)
    return float("nan") if value is None else float(value)
