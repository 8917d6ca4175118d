"""The last lines of the command ``pretrain``: metrics on held-out text."""

from dataclasses import replace

import pytest

from bertsmith.cli.pretrain import _print_metrics
from tests.train.conftest import TrainFunction
from tests.train.pretraining.test_heldout_evaluation import TWO_PHASES


def test_command_prints_the_loss_of_the_second_length(
    train: TrainFunction, capsys: pytest.CaptureFixture[str]
) -> None:
    """The last lines of `pretrain` have the loss at both lengths."""
    result = train(steps=2, **TWO_PHASES)
    _print_metrics(result, as_json=False)
    loss = result.heldout["phase2_mlm_loss"]
    expected = f"at the length of the second phase (5 sequences): masked-LM loss {loss:.3f}, "
    assert expected in capsys.readouterr().out


@pytest.mark.parametrize(("start_loss", "is_worse"), [(3.2, False), (2.8, True)])
def test_command_warns_of_a_model_that_became_worse(
    train: TrainFunction, capsys: pytest.CaptureFixture[str], start_loss: float, is_worse: bool
) -> None:
    """`pretrain --from` prints the loss before training, and warns if it was lower."""
    metrics = {
        "mlm_loss": 3.0, "perplexity": 20.1, "mlm_accuracy": 0.4, "unigram_entropy": 6.5,
        "num_sequences": 8, "unknown_share": 0.0,
    }  # fmt: skip
    start_metrics = metrics | {"mlm_loss": start_loss}
    result = replace(train(steps=1), heldout=metrics, start_heldout=start_metrics)
    _print_metrics(result, as_json=False)
    captured = capsys.readouterr()
    expected = f"masked-LM loss 3.000 (before training {start_loss:.3f}, unigram entropy 6.500)"
    assert expected in captured.out
    assert ("this model is worse than the model of --from" in captured.err) == is_worse


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({"data__pair_objective": "sop"}, ["masked-LM loss ", "sentence order: accuracy "]),
        ({}, ["masked-LM loss ", "next sentence: accuracy "]),
        (
            {
                "data__objective": "left-to-right",
                "data__nsp": "false",
                "model__attention": "causal",
            },
            ["held out (8 sequences): left-to-right loss "],
        ),
    ],
)
def test_command_names_the_objective(
    train: TrainFunction,
    capsys: pytest.CaptureFixture[str],
    changes: dict[str, str],
    expected: list[str],
) -> None:
    """The last lines of `pretrain` name the losses by the objectives of the run."""
    _print_metrics(train(steps=1, **changes), as_json=False)
    output = capsys.readouterr().out
    assert all(text in output for text in expected)
