"""Fine-tuning takes the steps of transformers' Trainer: same weights before, same weights after.

All examples are in each batch and nothing is dropped, so that chance has no part in it.
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
from bertsmith.train.engine.schedule import ScheduleSettings, lr_factor
from bertsmith.train.finetuning.finetune import finetune
from tests.model.examples import prime_config, randomize_weights
from tests.train.conftest import WORDS, make_tokenizer

EXAMPLES, STEPS = 24, 30


class Trainer(transformers.Trainer):  # type: ignore[misc]
    """The Trainer, with the learning rates that Bertsmith takes."""

    def create_scheduler(
        self, num_training_steps: int, optimizer: torch.optim.Optimizer | None = None
    ) -> Any:
        """Return linear warm-up and decay as the original's code has them."""
        timing = ScheduleSettings(steps=num_training_steps)
        self.lr_scheduler = torch.optim.lr_scheduler.LambdaLR(
            optimizer or self.optimizer, lambda step: lr_factor(step, timing)
        )
        return self.lr_scheduler


def labelled(kind: str) -> list[dict[str, Any]]:
    """Return texts of one to nine words and their labels."""
    draw = torch.Generator().manual_seed(0)
    rows = []
    for number in range(EXAMPLES):
        words = torch.randint(len(WORDS), (1 + number % 9,), generator=draw)
        label: Any = ("no", "yes")[number % 2] if kind == "single" else number / 7
        rows.append({"text": " ".join(WORDS[word] for word in words), "label": label})
    return rows


@pytest.mark.parametrize("library", ["MKL", "oneDNN"])
@pytest.mark.parametrize("kind", ["single", "regression"])
def test_same_weights_after_the_same_steps(
    kind: str, library: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Losses, Adam, warm-up, decay and clipping together; a rate near 0 shows the beginning."""
    # Where PyTorch has no oneDNN, both are MKL.
    onednn = library == "oneDNN" and hasattr(torch.ops.mkldnn, "_linear_pointwise")
    monkeypatch.setattr(linear, "has_slow_mkl", lambda: onednn)
    monkeypatch.setattr(linear, "ONEDNN_MIN_MACS", 1)
    words = make_tokenizer()
    config = prime_config(vocab_size=words.vocab_size, width=32, heads=2, dropout=0.0,
                    attention_dropout=0.0)  # fmt: skip
    torch.manual_seed(0)
    bundle.save(tmp_path / "start", randomize_weights(BertForPreTraining(config)), words, {})
    rows = labelled(kind)
    data = tmp_path / "data.jsonl"
    data.write_text("".join(json.dumps(row) + "\n" for row in rows))

    def tuned(rate: float) -> Path:
        values = {
            "task": {"kind": kind, "batch": EXAMPLES, "heldout": {"dev": str(data)}},
            "optim": {"lr": rate}, "schedule": {"steps": STEPS},
            "run": {"threads": 1, "precision": "fp32"},
        }  # fmt: skip
        found = finetune("classify", tmp_path / "start", tmp_path / str(rate), data=data,
                         values=values).model  # fmt: skip
        assert found is not None
        return found

    before, ours = (
        transformers.AutoModelForSequenceClassification.from_pretrained(tuned(rate))
        for rate in (1e-30, 1e-3)
    )
    first = {name: weight.clone() for name, weight in before.named_parameters()}
    theirs = trained(before, tmp_path, rows)
    for name, weight in ours.named_parameters():
        moved = (weight - first[name]).norm()
        assert moved > 0, name
        # A bias of keys is the same to all that is looked at: its gradient is rounding alone.
        least = 2e-5 if name.endswith("key.bias") else 0.0
        assert (weight - theirs[name]).norm() < 1e-3 * moved + least, name


def trained(model: Any, folder: Path, rows: list[dict[str, Any]]) -> dict[str, torch.Tensor]:
    """Return the weights that the Trainer ends with, by name."""
    tokenizer = transformers.AutoTokenizer.from_pretrained(next(folder.glob("0.001/model")))
    labels = model.config.label2id
    items = [{**tokenizer(row["text"]), "labels": labels.get(row["label"], row["label"])}
             for row in rows]  # fmt: skip
    arguments = transformers.TrainingArguments(
        output_dir=str(folder / "peer"), use_cpu=True, save_strategy="no", report_to=[],
        disable_tqdm=True, per_device_train_batch_size=EXAMPLES, max_steps=STEPS,
        learning_rate=1e-3, weight_decay=0.01, adam_epsilon=1e-6, max_grad_norm=1.0,
    )  # fmt: skip
    Trainer(
        model, arguments, train_dataset=items,
        data_collator=transformers.DataCollatorWithPadding(tokenizer),
    ).train()  # fmt: skip
    return dict(model.named_parameters())
