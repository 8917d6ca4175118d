"""A plan: what is to be made, and what that costs here."""

from pathlib import Path

import pytest

from bertsmith.data.settings import DataSettings
from bertsmith.lab import cost
from bertsmith.lab.bench import Bench
from bertsmith.lab.cost import Costs
from bertsmith.lab.kit import Kit
from bertsmith.lab.laboratory import Laboratory
from bertsmith.lab.making import OUTCOME
from bertsmith.lab.scale import SCALES
from bertsmith.lab.sources import Sources
from bertsmith.lab.stages import Stage
from bertsmith.model.config import ModelConfig
from bertsmith.progress import Silent
from tests.lab.given import LINES
from tests.lab.numbers import bench, number


def test_a_plan_tells_runs_and_minutes_and_makes_nothing(tmp_path: Path) -> None:
    """Every stage that is missing has its cost, by a probe of each shape; nothing is written."""
    laboratory = Laboratory("masking", scale="smoke", out=tmp_path)
    planned = laboratory.plan()
    kinds = [own.stage.kind for own in planned]
    assert kinds.count("pretrain") == 6
    assert kinds.count("finetune") == 18
    assert all(own.seconds is not None and own.seconds > 0 for own in planned)
    words = [own.words for own in planned]
    assert words[:2] == [
        "the text of (80, 10, 10), model, 0",
        "the words of (80, 10, 10), model, 0",
    ]
    assert len(set(words)) == len(words)
    assert not (tmp_path / "smoke" / "results").exists()
    costs = Costs()
    kit = laboratory.kit
    short, long = (kit.pretrained(steps=steps) for steps in (10, 1000))
    one, other = costs.of(short), costs.of(long)
    assert one is not None
    assert other is not None
    # An evaluation of 32 sequences, forward alone, is a third of four steps; of ten steps there is
    # one, of a thousand there are twenty.
    assert other == pytest.approx(one * (1000 + 20 * 4 / 3) / (10 + 4 / 3))
    # Left to right, every word is predicted, by a head that costs most of so small a model; with
    # many words so much more that no noise of the machine hides it.
    store = kit.store(size=30_000)
    causal, masked = costs.of(kit.left_to_right(store=store)), costs.of(kit.pretrained(store=store))
    assert causal is not None
    assert masked is not None
    assert causal > masked


def test_a_plan_counts_the_long_phase(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A tenth of the paper's steps have four times the tokens, and attention more than that."""
    monkeypatch.setattr(cost, "_probe", lambda config, data: float(data.length))  # noqa: ARG005
    (tmp_path / "a.jsonl").write_text(LINES)
    run = Kit(SCALES["full"], Sources(english=tmp_path / "a.jsonl"), tmp_path).usual()
    scored = 20 * 4096 / 256 / 3
    wanted = 1_000_000 * (0.9 * 128 + 0.1 * 512) + scored * 128
    assert Costs().of(run) == pytest.approx(wanted)


def test_a_plan_asks_a_given_model_for_no_more_than_it_has(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A model of 64 positions is probed at 64."""
    probed: list[int] = []

    def probe(_: ModelConfig, data: DataSettings) -> float:
        probed.append(data.length)
        return 1.0

    monkeypatch.setattr(cost, "_probe", probe)
    config = ModelConfig(
        vocab_size=99, layers=1, width=8, heads=1, feed_forward=8, max_positions=64
    )
    monkeypatch.setattr(cost, "load_encoder", lambda _: type("M", (), {"config": config}))
    kit = Kit(SCALES["small"], Sources(model=str(tmp_path)), tmp_path)
    files = {"train": tmp_path / "a.tsv", "dev": tmp_path / "a.tsv"}
    (tmp_path / "a.tsv").write_text("a\tb\n" * 9)
    monkeypatch.setattr(Sources, "files", lambda *_: tuple(files.values()))
    assert Costs().of(kit.tuned(None, "mrpc")) is not None
    assert probed == [64]


def test_a_plan_leaves_out_what_another_folder_of_results_has(tmp_path: Path) -> None:
    """With a shared work folder, what stands there is taken over and not made."""
    base = Stage("number", {})
    first, second = (Stage("number", {"add": add}, {"base": base}) for add in (10, 20))
    bench(tmp_path).make({"a": first})
    other = Bench(tmp_path / "other", tmp_path / "work", Silent(), {"number": number})
    assert other.missing([first, second]) == [second]
    other.make({"a": first, "b": second})
    assert [other.result(own) for own in (base, first, second)] == [
        {"value": 1}, {"value": 12}, {"value": 22},
    ]  # fmt: skip
    (tmp_path / "work" / base.name / OUTCOME).unlink()
    third = Stage("number", {"add": 30}, {"base": base})
    assert other.missing([third]) == [base, third]
