"""Settings of the student that is trained without its teacher."""

from bertsmith.lab.distillation_comparison import build_baseline_values
from bertsmith.model.config import ModelConfig
from bertsmith.train.distillation.settings import DistillRunSettings, DistillSettings
from bertsmith.train.embedding.settings import EmbeddingRunSettings
from bertsmith.train.engine.settings import FinetuneRunSettings


def test_student_without_teacher_is_trained_with_the_settings_of_the_run() -> None:
    """All settings of the table ``run`` but the start model are those of the distillation run."""
    run = FinetuneRunSettings(
        start_from="teacher", seed=7, device="cpu", precision="fp32", attention_kernel="padded",
        threads=1, micro_batch_tokens=512, log_every=3, model_selection="best", patience=2,
        num_frozen_layers=1,
    )  # fmt: skip
    settings = DistillRunSettings(
        model=ModelConfig(vocab_size=100),
        distill=DistillSettings(objective="embedding", train_files=["lines.txt"], batch_size=8),
        run=run,
    )
    values = build_baseline_values(settings)
    baseline = EmbeddingRunSettings.parse({**values, "model": {"vocab_size": 100}}, "the settings")
    assert baseline.run == run.model_copy(update={"start_from": ""})
    assert baseline.embedding.batch_size == 8
