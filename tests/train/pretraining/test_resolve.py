"""From wishes to one file of settings: what lies over what, and what is refused."""

import fcntl
from pathlib import Path
from typing import Any

import pytest

from bertsmith.data.store import Store
from bertsmith.errors import RunError, SettingsError
from bertsmith.settings import read_toml
from bertsmith.train.engine.run_directory import (
    SETTINGS_FILE,
    check_run_directory,
    load_run_settings,
)
from bertsmith.train.pretraining.pretrain import pretrain
from bertsmith.train.pretraining.recipes import PretrainSettings, with_steps
from bertsmith.train.pretraining.resolve import Overrides, resolve_settings
from tests.train.conftest import Train, assignments


@pytest.fixture(scope="session")
def opened(store: Path) -> Store:
    """The store, opened."""
    return Store.open(store)


@pytest.fixture
def settle(opened: Store) -> Any:
    """Resolve wishes about the store."""
    return lambda **wishes: resolve_settings(Overrides(data=opened.path, **wishes), opened)


def test_the_layers_lie_over_each_other(settle: Any, tmp_path: Path) -> None:
    """Recipe < size < configuration file < --set, key by key; the store gives the vocabulary."""
    config = tmp_path / "run.toml"
    config.write_text("[model]\nwidth = 64\n[optim]\nlr = 0.5\neps = 0.25\n")
    plain = settle()
    assert (plain.model.layers, plain.model.width) == (4, 256)
    assert plain.optim.beta2 == 0.98  # of the recipe
    assert plain.model.vocab_size == 5 + 1 + 60
    sized = settle(size="small", recipe="paper")
    assert (sized.model.width, sized.optim.beta2, sized.data.batch) == (512, 0.999, 256)
    assert (sized.schedule.long_length, sized.schedule.warmup_steps) == (512, 10_000)
    filed = settle(size="small", config=config)
    assert (filed.model.layers, filed.model.width, filed.optim.lr) == (4, 64, 0.5)
    all_of_them = settle(
        size="small", config=config, assignments=["optim.lr=2e-4", "model.dropout=0"]
    )
    assert all_of_them.model.width == 64
    assert (all_of_them.optim.lr, all_of_them.optim.eps) == (2e-4, 0.25)
    assert (all_of_them.model.dropout, all_of_them.optim.beta2) == (0, 0.98)


def test_the_recipe_follows_the_sizes_that_were_set(settle: Any) -> None:
    """Rate, deviation, first weights and feed-forward width are those of the sizes said last."""
    tiny = settle(size="tiny")
    assert (tiny.run.initialization, tiny.optim.lr, tiny.model.feed_forward) == (
        "cross-segment-heads",
        1e-3,
        512,
    )
    alone = settle(size="tiny", assignments=["data.nsp=false"])
    assert (alone.run.initialization, alone.optim.lr) == ("neighbor-heads", 2e-3)
    deeper = settle(size="tiny", assignments=["model.layers=4", "model.width=256"])
    assert (deeper.run.initialization, deeper.optim.lr) == ("cross-segment-heads", 1e-3)
    assert (deeper.model.feed_forward, deeper.model.init_range) == (1024, settle().model.init_range)
    for one in ("layers=1", "heads=1"):
        alone = settle(size="tiny", assignments=[f"model.{one}"])
        assert (alone.run.initialization, alone.optim.lr) == ("neighbor-heads", 2e-3), one
    own = settle(size="tiny", assignments=["model.width=256", "model.feed_forward=300"])
    assert own.model.feed_forward == 300
    assert settle(size="tiny", recipe="paper").run.initialization == "random"
    with pytest.raises(SettingsError, match="width"):
        settle(assignments=["model.width=0"])


def test_the_model_follows_the_data(settle: Any) -> None:
    """Without pairs the model has no next-sentence head; to say both unlike is refused."""
    assert settle().model.nsp
    assert not settle(assignments=["data.nsp=false"]).model.nsp
    with pytest.raises(SettingsError, match=r"set data\.nsp alone"):
        settle(assignments=["model.nsp=false"])


def test_an_unknown_key_names_the_nearest_and_its_place(settle: Any, tmp_path: Path) -> None:
    """The message has the key, the nearest valid one, and the file or option it came from."""
    config = tmp_path / "run.toml"
    config.write_text("[optim]\nlearning = 1.0\nwieght_decay = 0.1\n")
    with pytest.raises(SettingsError) as told:
        settle(config=config)
    assert f"{config}: unknown setting 'optim.wieght_decay'" in str(told.value)
    assert "did you mean 'weight_decay'?" in str(told.value)
    config.write_text("[optim]\nlr = 0.1\n")
    with pytest.raises(
        SettingsError, match=r"unknown setting 'data\.lenght'; did you mean 'length"
    ):
        settle(assignments=["data.lenght=64"])
    with pytest.raises(SettingsError, match=r"'run\.epochs'; did you mean 'schedule\.epochs'"):
        settle(assignments=["run.epochs=3"])
    with pytest.raises(SettingsError, match=r"'lr'; did you mean 'optim\.lr'"):
        settle(assignments=["lr=3"])
    with pytest.raises(SettingsError, match=r"'optim\.learning' \(known here: lr"):
        settle(assignments=["optim.learning=3"])
    with pytest.raises(SettingsError) as told:
        settle(config=config, assignments=["optims.lr=1.0"])
    assert "unknown setting 'optims'; did you mean 'optim'?" in str(told.value)
    assert str(config) not in str(told.value), "the file is not to blame"


@pytest.mark.parametrize(
    ("assignment", "message"),
    [
        ("optim.lr=fast", r"optim\.lr: Input should be a valid number, found 'fast'"),
        ("optim.lr=0", r"optim\.lr: Input should be greater than 0"),
        ("data=5", r"data: Input should be"),
        ("model=5", r"model: Input should be"),
        ("run.seed=-1", r"run\.seed: Input should be greater than or equal to 0"),
        ("optim.lr", "expected KEY=VALUE"),
        ("model.heads=7", r"^the settings: model: width 256 is not a multiple of heads 7$"),
        ("model.vocab_size=65", r"vocab_size is 65, but the store's vocabulary has 66 words"),
        ("data.length=600", r"sequences of 600 tokens, but model\.max_positions is 512"),
        ("schedule.long_length=513", r"sequences of 513 tokens"),
        ("model.attention=causal", r"\[CLS\], .* sees only itself; set data\.nsp=false"),
        ("schedule.steps=0", r"schedule\.steps: Input should be greater than 0"),
        ("run.precision=fp8", r"run\.precision: Input should be 'auto', 'fp32' or 'bf16'"),
    ],
)
def test_what_cannot_be_is_told(settle: Any, assignment: str, message: str) -> None:
    """A wrong type, a value out of range and a contradiction are each a SettingsError."""
    with pytest.raises(SettingsError, match=message):
        settle(assignments=[assignment])


def test_a_larger_vocabulary_is_allowed(settle: Any) -> None:
    """A model may have rows to spare: more words than the store."""
    assert settle(assignments=["model.vocab_size=72"]).model.vocab_size == 72


def test_files_that_cannot_be_read(settle: Any, tmp_path: Path) -> None:
    """No such file, a folder, and a file that is no TOML, each by its name."""
    with pytest.raises(SettingsError, match=r"none\.toml: no such settings file"):
        settle(config=tmp_path / "none.toml")
    with pytest.raises(SettingsError, match="cannot be read"):
        settle(config=tmp_path)
    (tmp_path / "bad.toml").write_text("[optim\n")
    with pytest.raises(SettingsError, match=r"bad\.toml: not valid TOML"):
        settle(config=tmp_path / "bad.toml")
    with pytest.raises(SettingsError, match="the sizes are tiny, mini"):
        settle(size="huge")


def test_the_file_of_a_run_is_complete(settle: Any, tmp_path: Path) -> None:
    """What is written is read back as the same settings, whatever the recipe."""
    for recipe in ("fast", "paper"):
        settings = with_steps(settle(recipe=recipe), 40)
        (tmp_path / SETTINGS_FILE).write_text(settings.to_toml())
        assert PretrainSettings.parse(read_toml(tmp_path / SETTINGS_FILE), "here") == settings

    def intervals(steps: int, **chosen: Any) -> tuple[int | None, int | None]:
        told = with_steps(settle(**chosen), steps)
        return told.run.eval_every, told.checkpoint.every

    # A twentieth of the run, but ten steps at least; what was said counts.
    assert [intervals(steps) for steps in (4, 40, 1000)] == [(4, 4), (10, 10), (50, 50)]
    assert intervals(1000, assignments=["run.eval_every=7", "checkpoint.every=9"]) == (7, 9)


def test_other_settings_are_refused_by_name(settle: Any, tmp_path: Path) -> None:
    """Each difference is named with what stands there and what is wished; no other is."""
    stored = with_steps(settle(size="tiny"), 40)
    (tmp_path / SETTINGS_FILE).write_text(stored.to_toml())
    assert load_run_settings(tmp_path, settle(size="tiny")) == stored
    chosen = [
        "model.dropout=0.2",
        "run.seed=3",
        "data.batch=7",
        "checkpoint.keep=9",
        "optim.lr=0.5",
    ]
    wished = settle(size="tiny", assignments=chosen)
    with pytest.raises(RunError) as told:
        load_run_settings(tmp_path, wished)
    lines = {line.strip() for line in str(told.value).splitlines()[1:-1]}
    assert lines == {
        "model.dropout: 0.1 there, 0.2 now",
        "data.batch: 32 there, 7 now",
        "optim.lr: 0.001 there, 0.5 now",
        "run.seed: 0 there, 3 now",
    }


def test_a_store_may_move_but_not_change(settle: Any, tmp_path: Path) -> None:
    """Another path of the same store is accepted; another store is not."""
    (tmp_path / SETTINGS_FILE).write_text(with_steps(settle(), 5).to_toml())
    settings = settle()
    moved = settings.model_copy(update={"run": settings.run.model_copy(update={"data": "/else"})})
    assert load_run_settings(tmp_path, moved)
    other = settings.model_copy(update={"run": settings.run.model_copy(update={"store": "0" * 16})})
    with pytest.raises(RunError, match=r"run\.store: .* there, '0000000000000000' now"):
        load_run_settings(tmp_path, other)


def test_foreign_places_are_refused_untouched(store: Path, tmp_path: Path) -> None:
    """A folder with somebody's files, and a file, are refused and stay as they were."""
    folder = tmp_path / "home"
    folder.mkdir()
    (folder / "letter.txt").write_text("mine")
    for place, message in ((folder, "there are files here"), (folder / "letter.txt", "a file")):
        with pytest.raises(RunError, match=message):
            pretrain(store, place, steps=1, assignments=assignments())
    assert [path.name for path in folder.iterdir()] == ["letter.txt"]
    assert (folder / "letter.txt").read_text() == "mine"


def test_what_a_kill_left_at_the_start_is_no_foreign_file(tmp_path: Path) -> None:
    """The lock and half-written settings do not stand in the way of the next start."""
    (tmp_path / ".lock").touch()
    (tmp_path / f".{SETTINGS_FILE}.4711.tmp").write_text("[mod")
    check_run_directory(tmp_path)
    check_run_directory(tmp_path / "none")


def test_two_at_once_are_refused(train: Train, tmp_path: Path) -> None:
    """While one process holds the run, another one is told so, and nothing is changed."""
    (tmp_path / "run").mkdir()
    with (tmp_path / "run" / ".lock").open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        with pytest.raises(RunError, match="another process is training here"):
            train(steps=1)
    assert [path.name for path in (tmp_path / "run").iterdir()] == [".lock"]
