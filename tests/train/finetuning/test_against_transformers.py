"""Fine-tuning ends with the same weights as the Trainer of transformers.

Each batch has all examples, and there is no dropout, so the runs have no randomness.
"""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

from bertsmith import bundle
from bertsmith.model.bert import BertForPreTraining
from bertsmith.model.ops import linear
from bertsmith.train.engine.schedule import ScheduleSettings, compute_lr_factor
from bertsmith.train.finetuning.finetune import finetune
from tests.model.examples import make_prime_size_config, randomize_weights
from tests.train.conftest import WORDS, make_tokenizer

NUM_EXAMPLES, STEPS = 24, 30
LEARNING_RATE = 1e-3


class TrainerWithBertsmithSchedule(transformers.Trainer):  # type: ignore[misc]
    """The Trainer of transformers with Bertsmith's learning rate schedule."""

    def create_scheduler(
        self, num_training_steps: int, optimizer: torch.optim.Optimizer | None = None
    ) -> Any:
        """Return a scheduler with the warm-up and decay of the original code."""
        settings = ScheduleSettings(steps=num_training_steps)
        self.lr_scheduler = torch.optim.lr_scheduler.LambdaLR(
            optimizer or self.optimizer, lambda step: compute_lr_factor(step, settings)
        )
        return self.lr_scheduler


def make_rows(kind: str) -> list[dict[str, Any]]:
    """Return rows with a random text of one to nine words and a label."""
    generator = torch.Generator().manual_seed(0)
    rows = []
    for index in range(NUM_EXAMPLES):
        word_ids = torch.randint(len(WORDS), (1 + index % 9,), generator=generator)
        label: Any = ("no", "yes")[index % 2] if kind == "single" else index / 7
        rows.append({"text": " ".join(WORDS[i] for i in word_ids), "label": label})
    return rows


@pytest.mark.parametrize("library", ["MKL", "oneDNN"])
@pytest.mark.parametrize("kind", ["single", "regression"])
def test_weights_equal_those_of_the_trainer(
    kind: str, library: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """After 30 steps, the weights equal those of the Trainer to 0.1 % of their change.

    The initial weights of both trainings come from a run with a learning rate of 1e-30.
    """
    # A PyTorch build without oneDNN uses MKL in both cases.
    use_onednn = library == "oneDNN" and hasattr(torch.ops.mkldnn, "_linear_pointwise")
    monkeypatch.setattr(linear, "has_slow_mkl", lambda: use_onednn)
    monkeypatch.setattr(linear, "ONEDNN_MIN_MACS", 1)
    tokenizer = make_tokenizer()
    config = make_prime_size_config(
        vocab_size=tokenizer.vocab_size, width=32, heads=2, dropout=0.0, attention_dropout=0.0
    )
    torch.manual_seed(0)
    model = randomize_weights(BertForPreTraining(config))
    bundle.save(tmp_path / "start", model, tokenizer, {})
    rows = make_rows(kind)
    data = tmp_path / "data.jsonl"
    data.write_text("".join(json.dumps(row) + "\n" for row in rows))

    def finetune_with_lr(lr: float, steps: int) -> Any:
        values = {
            "task": {
                "kind": kind,
                "batch_size": NUM_EXAMPLES,
                "validation_files": {"dev": str(data)},
            },
            "optim": {"lr": lr},
            "schedule": {"steps": steps},
            "run": {"threads": 1, "precision": "fp32", "eval_strategy": "end"},
        }
        result = finetune(
            "classify", tmp_path / "start", tmp_path / str(lr), data=data, values=values
        )
        assert result.model is not None
        return transformers.AutoModelForSequenceClassification.from_pretrained(result.model)

    initial_model = finetune_with_lr(1e-30, 1)
    bertsmith_model = finetune_with_lr(LEARNING_RATE, STEPS)
    tokenizer_path = tmp_path / str(LEARNING_RATE) / "model"
    initial = {name: weight.clone() for name, weight in initial_model.named_parameters()}
    expected = train_with_transformers(initial_model, tokenizer_path, rows, tmp_path / "trainer")
    for name, weight in bertsmith_model.named_parameters():
        change = (weight - initial[name]).norm()
        assert change > 0, name
        # The key bias does not change the softmax, so its gradient is only rounding error.
        tolerance = 2e-5 if name.endswith("key.bias") else 0.0
        assert (weight - expected[name]).norm() < 1e-3 * change + tolerance, name


def train_with_transformers(
    model: Any, tokenizer_path: Path, rows: list[dict[str, Any]], out: Path
) -> dict[str, torch.Tensor]:
    """Train ``model`` with the Trainer of transformers, and return its weights by name."""
    tokenizer = transformers.AutoTokenizer.from_pretrained(tokenizer_path)
    label_ids = model.config.label2id
    items = [
        {**tokenizer(row["text"]), "labels": label_ids.get(row["label"], row["label"])}
        for row in rows
    ]
    arguments = transformers.TrainingArguments(
        output_dir=str(out),
        use_cpu=True,
        save_strategy="no",
        report_to=[],
        disable_tqdm=True,
        per_device_train_batch_size=NUM_EXAMPLES,
        max_steps=STEPS,
        learning_rate=LEARNING_RATE,
        weight_decay=0.01,
        adam_epsilon=1e-6,
        max_grad_norm=1.0,
    )
    TrainerWithBertsmithSchedule(
        model,
        arguments,
        train_dataset=items,
        data_collator=transformers.DataCollatorWithPadding(tokenizer),
    ).train()
    return dict(model.named_parameters())
