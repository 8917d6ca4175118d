"""Resolving the settings of a run: precedence, defaults and errors."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from bertsmith.data.store import Store
from bertsmith.errors import SettingsError
from bertsmith.model.ops.dropout import Dropout
from bertsmith.settings import parse_assignments, read_toml
from bertsmith.train.engine.run_directory import (
    SETTINGS_FILE,
)
from bertsmith.train.pretraining.pretrain import pretrain, write_initial_model
from bertsmith.train.pretraining.recipes import (
    PretrainSettings,
    resolve_steps,
)
from bertsmith.train.pretraining.resolve import (
    Overrides,
    resolve_run_settings,
    resolve_settings,
)
from bertsmith.train.pretraining.session import Session
from tests.train.conftest import TrainFunction, make_assignments


def test_precedence_of_settings(resolve: Any, tmp_path: Path) -> None:
    """The size overrides the recipe, the settings file overrides both, and --set overrides all."""
    config = tmp_path / "run.toml"
    config.write_text("[model]\nwidth = 64\n[optim]\nlr = 0.5\neps = 0.25\n")
    default = resolve()
    assert (default.model.layers, default.model.width) == (4, 256)
    assert default.optim.beta2 == 0.98, "the value of the recipe"
    # The vocabulary of the store has 5 special tokens, a period and 60 words.
    assert default.model.vocab_size == 5 + 1 + 60
    paper = resolve(size="small", recipe="paper")
    assert (paper.model.width, paper.optim.beta2, paper.data.batch_size) == (512, 0.999, 256)
    assert (paper.schedule.phase2_max_seqlen, paper.schedule.warmup_steps) == (512, 10_000)
    with_file = resolve(size="small", config=config)
    assert (with_file.model.layers, with_file.model.width, with_file.optim.lr) == (4, 64, 0.5)
    with_all = resolve(
        size="small", config=config, assignments=["optim.lr=2e-4", "model.dropout=0"]
    )
    assert with_all.model.width == 64
    assert (with_all.optim.lr, with_all.optim.eps) == (2e-4, 0.25)
    assert (with_all.model.dropout, with_all.optim.beta2) == (0, 0.98)


def test_default_bias_is_for_masked_language_models(resolve: Any) -> None:
    """`paper`, left-to-right training and runs of earlier versions have no bias of attention."""

    def count_steps(**options: Any) -> int:
        steps: int = resolve(**options).schedule.neighbor_bias_steps
        return steps

    assert count_steps() == 1000
    assert count_steps(assignments=["schedule.neighbor_bias_steps=20"]) == 20
    assert count_steps(recipe="paper") == 0
    assert count_steps(assignments=["schedule.causal_fraction=0.2"]) == 0
    assert count_steps(assignments=["data.objective=left-to-right", "model.attention=causal"]) == 0


def test_recipe_defaults_depend_on_the_final_sizes(resolve: Any) -> None:
    """Learning rate, initialization and feed-forward width depend on the sizes the user sets."""
    tiny = resolve(size="tiny")
    assert (tiny.run.initialization, tiny.optim.lr) == ("cross-segment-heads", 2e-3)
    assert tiny.model.feed_forward == 512
    with_nsp = resolve(size="tiny", assignments=["data.nsp=true"])
    assert (with_nsp.run.initialization, with_nsp.optim.lr) == ("cross-segment-heads", 1e-3)
    sentence_order = resolve(size="tiny", assignments=["data.pair_objective=sop"])
    assert sentence_order.optim.lr == 2e-3
    assert sentence_order.model.nsp
    larger = resolve(size="tiny", assignments=["model.layers=4", "model.width=256"])
    assert larger.optim.lr == 2e-3
    assert resolve(size="tiny", assignments=["model.width=512", "model.heads=8"]).optim.lr == 7e-4
    assert larger.model.feed_forward == 1024
    assert larger.model.init_range == resolve().model.init_range
    for assignment in ("model.layers=1", "model.heads=1"):
        smaller = resolve(size="tiny", assignments=[assignment, "data.nsp=true"])
        assert (smaller.run.initialization, smaller.optim.lr) == ("neighbor-heads", 2e-3), (
            assignment
        )
    explicit = resolve(size="tiny", assignments=["model.width=256", "model.feed_forward=300"])
    assert explicit.model.feed_forward == 300
    assert resolve(size="tiny", recipe="paper").run.initialization == "random"
    with pytest.raises(SettingsError, match="width"):
        resolve(assignments=["model.width=0"])


def test_data_nsp_determines_model_nsp(resolve: Any) -> None:
    """The model has an NSP head if data.nsp is true; setting model.nsp differently is an error.

    The recipe "paper" trains next-sentence prediction, "fast" does not.
    """
    assert resolve(assignments=["data.nsp=true"]).model.nsp
    assert not resolve(assignments=["data.nsp=false"], recipe="paper").model.nsp
    assert resolve(recipe="paper").model.nsp
    assert not resolve().model.nsp
    with pytest.raises(SettingsError, match=r"set only data\.nsp"):
        resolve(assignments=["model.nsp=true"])


def test_masking_rate_of_the_user_is_constant(resolve: Any) -> None:
    """The masking rate of "fast" falls to 15 %, unless the user sets a rate or has no masks."""

    def get_rates(*assignments: str, **options: Any) -> tuple[float, float | None]:
        data = resolve(assignments=list(assignments), **options).data
        return data.masking_rate, data.final_masking_rate

    assert get_rates() == (0.3, 0.15)
    assert get_rates("data.masking_rate=0.4") == (0.4, None)
    assert get_rates("data.masking_rate=0.4", "data.final_masking_rate=0.2") == (0.4, 0.2)
    assert get_rates(recipe="paper") == (0.15, None)
    left_to_right = ("data.objective=left-to-right", "model.attention=causal")
    assert get_rates(*left_to_right) == (0.15, None)


def test_dropout_of_the_run_differs_from_that_of_the_model(store: Path, resolve: Any) -> None:
    """Pre-training with "fast" has no dropout, but the model's config has that of the paper.

    Fine-tuning uses the rates of the config.
    """
    session = Session(
        resolve(size="tiny", assignments=["model.max_positions=128"]), Store.open(store)
    )
    rates = {module.rate for module in session.model.modules() if isinstance(module, Dropout)}
    assert rates == {0.0}
    assert session.model.config.dropout == 0.1
    set_by_user = resolve(size="tiny", assignments=["run.dropout=0.2"])
    session = Session(set_by_user, Store.open(store))
    rates = {module.rate for module in session.model.modules() if isinstance(module, Dropout)}
    assert rates == {0.2}


def test_unknown_key_suggests_the_nearest_valid_one(resolve: Any, tmp_path: Path) -> None:
    """The error names the key, the nearest valid key, and the settings file if it has the key."""
    config = tmp_path / "run.toml"
    config.write_text("[optim]\nlearning = 1.0\nwieght_decay = 0.1\n")
    with pytest.raises(SettingsError) as caught:
        resolve(config=config)
    assert f"{config}: unknown setting 'optim.wieght_decay'" in str(caught.value)
    assert "did you mean 'weight_decay'?" in str(caught.value)
    config.write_text("[optim]\nlr = 0.1\n")
    with pytest.raises(
        SettingsError, match=r"unknown setting 'data\.lenght'; did you mean 'max_seqlen"
    ):
        resolve(assignments=["data.lenght=64"])
    with pytest.raises(SettingsError, match=r"'run\.epochs'; did you mean 'schedule\.epochs'"):
        resolve(assignments=["run.epochs=3"])
    with pytest.raises(SettingsError, match=r"'lr'; did you mean 'optim\.lr'"):
        resolve(assignments=["lr=3"])
    with pytest.raises(SettingsError, match=r"'optim\.learning' \(.*lr"):
        resolve(assignments=["optim.learning=3"])
    with pytest.raises(SettingsError) as caught:
        resolve(config=config, assignments=["optims.lr=1.0"])
    assert "unknown setting 'optims'; did you mean 'optim'?" in str(caught.value)
    assert str(config) not in str(caught.value), "the error is not in the file"


@pytest.mark.parametrize(
    ("assignment", "message"),
    [
        ("optim.lr=fast", r"optim\.lr: Input should be a valid number, found 'fast'"),
        ("optim.lr=0", r"optim\.lr: Input should be greater than 0"),
        ("data=5", r"data: Input should be"),
        ("model=5", r"model: Input should be"),
        ("run.seed=-1", r"run\.seed: Input should be greater than or equal to 0"),
        ("optim.lr", "expected KEY=VALUE"),
        ("model.heads=7", r"^the settings: model: width 256 is not a multiple of heads 7"),
        ("model.vocab_size=65", r"vocab_size is 65, but the store's vocabulary has 66 tokens"),
        (
            "data.max_seqlen=600",
            r"data\.max_seqlen is 600, .*; reduce data\.max_seqlen or raise model\.max_positions",
        ),
        ("schedule.phase2_max_seqlen=64", r"phase2_max_seqlen is 64, but data\.max_seqlen is 128"),
        ("schedule.phase2_max_seqlen=513", r"schedule\.phase2_max_seqlen is 513, but model\."),
        (
            "model.segments=1,data.nsp=true",
            r"model\.segments is 1, .* need 2 segments; set data\.nsp=false or model\.segments=2$",
        ),
        (
            "model.attention=causal,data.nsp=true",
            r"\[CLS\] sees only itself .*; set data\.nsp=false",
        ),
        ("schedule.steps=0", r"schedule\.steps: Input should be greater than 0"),
        ("run.precision=fp8", r"run\.precision: Input should be 'auto', 'fp32' or 'bf16'"),
    ],
)
def test_invalid_values_are_rejected(resolve: Any, assignment: str, message: str) -> None:
    """A wrong type, a value out of range or a contradiction raises a SettingsError."""
    with pytest.raises(SettingsError, match=message):
        resolve(assignments=assignment.split(","))


def test_larger_vocabulary_than_the_store_is_allowed(resolve: Any) -> None:
    """A model may have more embedding rows than the store has tokens."""
    assert resolve(assignments=["model.vocab_size=72"]).model.vocab_size == 72


def test_unreadable_settings_files_are_rejected(resolve: Any, tmp_path: Path) -> None:
    """A missing file, a folder, invalid TOML and an unknown size are errors that name them."""
    with pytest.raises(SettingsError, match=r"none\.toml: no such settings file"):
        resolve(config=tmp_path / "none.toml")
    with pytest.raises(SettingsError, match="cannot be read"):
        resolve(config=tmp_path)
    (tmp_path / "bad.toml").write_text("[optim\n")
    with pytest.raises(SettingsError, match=r"bad\.toml: not valid TOML"):
        resolve(config=tmp_path / "bad.toml")
    with pytest.raises(SettingsError, match="the sizes are tiny, mini"):
        resolve(size="huge")


def test_stored_settings_are_complete(resolve: Any, tmp_path: Path) -> None:
    """Settings are unchanged after writing and reading; intervals depend on the number of steps."""
    for recipe in ("fast", "paper"):
        settings = resolve_steps(resolve(recipe=recipe), 40)
        (tmp_path / SETTINGS_FILE).write_text(settings.to_toml())
        assert PretrainSettings.parse(read_toml(tmp_path / SETTINGS_FILE), "here") == settings

    def get_intervals(steps: int, **overrides: Any) -> tuple[int | None, int | None]:
        settings = resolve_steps(resolve(**overrides), steps)
        return settings.run.eval_every, settings.checkpoint.steps

    # The default is a twentieth of the run and at least ten steps.
    assert [get_intervals(steps) for steps in (4, 40, 1000)] == [(4, 4), (10, 10), (50, 50)]
    assert get_intervals(1000, assignments=["run.eval_every=7", "checkpoint.steps=9"]) == (7, 9)


def test_settings_of_a_run_are_a_settings_file(
    train: TrainFunction, store: Path, tmp_path: Path
) -> None:
    """``config=RUN/settings.toml`` repeats that run; other arguments replace its settings."""
    train("first", epochs=0.2, optim__lr=5e-4)
    config = tmp_path / "first" / SETTINGS_FILE
    pretrain(store, tmp_path / "second", config=config)
    first, second = read_toml(config), read_toml(tmp_path / "second" / SETTINGS_FILE)
    assert first == second
    weights = [
        (tmp_path / name / "model/model.safetensors").read_bytes() for name in ("first", "second")
    ]
    assert weights[0] == weights[1]
    overrides = Overrides(data=store, config=config)
    resolved = resolve_run_settings(overrides, Store.open(store), {"steps": 77})
    assert (resolved.schedule.steps, resolved.schedule.epochs) == (77, None)
    # The intervals depend on the number of steps, which has changed.
    assert resolved.run.eval_every is resolved.checkpoint.steps is None
    for contradicting_overrides, option in (
        (replace(overrides, size="tiny"), "--size"),
        (replace(overrides, recipe="paper"), "--recipe paper"),
    ):
        with pytest.raises(SettingsError, match=f"{option}.*leave out"):
            resolve_settings(contradicting_overrides, Store.open(store))
    for text in ("[task]\nname = 'rte'\n", "[embedding]\nloss = 'mnrl'\n"):
        config.write_text(text)
        with pytest.raises(SettingsError, match="settings of a fine-tuning or distillation run"):
            resolve_settings(overrides, Store.open(store))


def test_recipe_option_must_be_that_of_the_settings_of_a_run(resolve: Any, tmp_path: Path) -> None:
    """Another recipe than that of the file is an error, also if it is the default recipe."""
    config = tmp_path / SETTINGS_FILE
    for recipe, other_recipe in (("fast", "paper"), ("paper", "fast")):
        config.write_text(resolve(recipe=recipe).to_toml())
        assert resolve(config=config).run.recipe == recipe
        assert resolve(config=config, recipe=recipe).run.recipe == recipe
        with pytest.raises(SettingsError, match=f"--recipe {other_recipe} has no effect"):
            resolve(config=config, recipe=other_recipe)


def test_recipe_and_start_model_can_be_settings(resolve: Any, store: Path, tmp_path: Path) -> None:
    """run.recipe and run.start_from have the effect of --recipe and --from."""
    assert resolve(assignments=["run.recipe=paper"]) == resolve(recipe="paper")
    with pytest.raises(SettingsError, match=r"run\.recipe is 'paper', but --recipe is 'fast'"):
        resolve(recipe="fast", assignments=["run.recipe=paper"])
    start = str(tmp_path / "start")
    write_initial_model(store, tmp_path / "start", assignments=make_assignments())
    common = ["data.max_seqlen=32"]
    expected = resolve(start_from=start, assignments=common)
    assert expected.run.start_id is not None
    assert resolve(assignments=[*common, f"run.start_from={start}"]) == expected
    with pytest.raises(SettingsError, match=r"run\.start_from is 'other', but --from is"):
        resolve(start_from=start, assignments=["run.start_from=other"])
    config = tmp_path / "run.toml"
    config.write_text(resolve(assignments=common).to_toml())
    continued = resolve(config=config, assignments=[f"run.start_from={start}"])
    assert continued.run.start_id == expected.run.start_id
    with pytest.raises(SettingsError, match="recipe paper has no effect"):
        resolve(config=config, assignments=["run.recipe=paper"])
    for assignment in ("run=5", "run.start_from=5", "run.recipe=5"):
        with pytest.raises(SettingsError, match="run"):
            resolve(assignments=[assignment])


@pytest.mark.parametrize("length", ["minutes=10.0", "epochs=3.0", "steps=7"])
@pytest.mark.parametrize("file_length", ["steps", "epochs"])
@pytest.mark.parametrize("is_run", [True, False])
def test_new_length_replaces_that_of_the_file(
    resolve: Any, tmp_path: Path, length: str, file_length: str, is_run: bool
) -> None:
    """Without this, the number of steps in a settings file would override other lengths."""
    config = tmp_path / SETTINGS_FILE
    config.write_text(f"[schedule]\n{file_length} = 5\n")
    if is_run:
        settings = resolve(assignments=[f"schedule.{file_length}=5", "schedule.min_steps=2"])
        config.write_text(settings.to_toml())
    schedule = resolve(config=config, assignments=[f"schedule.{length}"]).schedule
    name, value = length.split("=")
    lengths = {key: getattr(schedule, key) for key in ("steps", "epochs", "minutes")}
    assert lengths == dict.fromkeys(lengths) | {name: float(value)}


def test_missing_second_phase_of_a_run_is_repeated(resolve: Any, tmp_path: Path) -> None:
    """The recipe `paper` has a second phase; a run without it stays without it."""
    values = {"schedule": {"phase2_max_seqlen": None}}
    settings = resolve(recipe="paper", values=values)
    assert settings.schedule.phase2_max_seqlen is None
    config = tmp_path / SETTINGS_FILE
    config.write_text(settings.to_toml())
    assert resolve(config=config).schedule.phase2_max_seqlen is None
    assert resolve(config=str(config)) == resolve(config=config)


def test_repeated_run_has_the_bias_of_that_run(resolve: Any, store: Path, tmp_path: Path) -> None:
    """A run of a version without the bias has none; a new start model needs none."""
    config = tmp_path / SETTINGS_FILE
    text = resolve(assignments=make_assignments()).to_toml()
    assert text.count("neighbor_bias_steps = 1000\n") == 1
    config.write_text(text)
    assert resolve(config=config).schedule.neighbor_bias_steps == 1000
    write_initial_model(store, tmp_path / "start", assignments=make_assignments())
    continued = resolve(config=config, start_from=str(tmp_path / "start"))
    assert continued.schedule.neighbor_bias_steps == 0
    config.write_text(text.replace("neighbor_bias_steps = 1000\n", ""))
    assert resolve(config=config).schedule.neighbor_bias_steps == 0


def test_repeated_run_has_no_limit_of_another_time_budget(resolve: Any, tmp_path: Path) -> None:
    """A time budget reduces the evaluations; a new masking rate is constant, as in a new run."""
    config = tmp_path / SETTINGS_FILE
    assignments = ["schedule.minutes=1.0", "run.max_eval_sequences=60"]
    config.write_text(resolve(assignments=assignments).to_toml())
    assert resolve(config=config).run.max_eval_sequences == 512
    config.write_text(resolve(assignments=assignments[1:]).to_toml())
    assert resolve(config=config).run.max_eval_sequences == 60
    assert resolve(config=config).data.final_masking_rate == 0.15
    constant = resolve(config=config, assignments=["data.masking_rate=0.4"])
    assert (constant.data.masking_rate, constant.data.final_masking_rate) == (0.4, None)


def test_unknown_recipe_is_an_error(resolve: Any) -> None:
    """A misspelled recipe is not the default recipe."""
    with pytest.raises(SettingsError, match=r"run\.recipe is 'Paper'; expected one of fast, paper"):
        resolve(recipe="Paper")


def test_pairs_can_be_changed_in_the_settings_of_a_run(resolve: Any, tmp_path: Path) -> None:
    """data.nsp and data.pair_objective replace those of the run, and determine model.nsp."""
    config = tmp_path / SETTINGS_FILE
    config.write_text(resolve().to_toml())
    assert not resolve(config=config).model.nsp
    assert resolve(config=config, assignments=["data.nsp=true"]).model.nsp
    sentence_order = resolve(config=config, assignments=["data.pair_objective=sop"])
    assert sentence_order.data.nsp
    assert sentence_order.model.nsp
    config.write_text(sentence_order.to_toml())
    assert resolve(config=config, assignments=["data.nsp=false"]).data.pair_objective == "nsp"
    config.write_text(resolve(recipe="paper").to_toml())
    assert resolve(config=config).model.nsp
    assert not resolve(config=config, assignments=["data.nsp=false"]).model.nsp
    with pytest.raises(SettingsError, match=r"data\.pair_objective is 'sop', but data\.nsp is"):
        resolve(assignments=["data.pair_objective=sop", "data.nsp=false"])


def test_sequences_longer_than_the_start_model_allows_are_rejected(
    resolve: Any, store: Path, tmp_path: Path
) -> None:
    """The error names the setting of the recipe, and does not advise to change the model."""
    write_initial_model(store, tmp_path / "start", assignments=make_assignments())
    expected = (
        r"schedule\.phase2_max_seqlen is 512, but model\.max_positions is 64; reduce "
        r"schedule\.phase2_max_seqlen$"
    )
    with pytest.raises(SettingsError, match=expected):
        resolve(start_from=str(tmp_path / "start"), recipe="paper",
                assignments=["data.max_seqlen=32"])  # fmt: skip


def test_sentence_pairs_need_a_start_model_with_two_segments(
    resolve: Any, store: Path, tmp_path: Path
) -> None:
    """The error does not advise to change the number of segments, which the start model has."""
    one_segment = make_assignments(model__segments=1, data__nsp="false")
    write_initial_model(store, tmp_path / "start", assignments=one_segment)
    with pytest.raises(SettingsError, match=r"model\.segments is 1, .*; set data\.nsp=false$"):
        resolve(start_from=str(tmp_path / "start"),
                assignments=["data.max_seqlen=32", "data.nsp=true"])  # fmt: skip


def test_settings_of_a_continued_run_are_a_settings_file(
    train: TrainFunction, store: Path, tmp_path: Path
) -> None:
    """A new run with the settings of a continued run starts from the same model."""
    train("first", steps=2)
    train("second", steps=2, start_from=str(tmp_path / "first"), optim__lr=5e-4)
    config = tmp_path / "second" / SETTINGS_FILE
    pretrain(store, tmp_path / "third", config=config)
    assert read_toml(config) == read_toml(tmp_path / "third" / SETTINGS_FILE)
    weights = [
        (tmp_path / name / "model/model.safetensors").read_bytes() for name in ("second", "third")
    ]
    assert weights[0] == weights[1]


@pytest.mark.parametrize(
    ("device", "cuda", "batch_size"),
    [(None, False, 32), (None, True, 256), ("auto", True, 256), ("cpu", True, 32),
     ("cuda:1", True, 256)],
)  # fmt: skip
def test_default_batch_size_depends_on_the_device_of_the_run(
    resolve: Any, device: str | None, cuda: bool, batch_size: int
) -> None:
    """The default is 32 on the CPU, even if CUDA is available, and 256 on CUDA."""
    assignments = [] if device is None else [f"run.device={device}"]
    assert resolve(cuda=cuda, assignments=assignments).data.batch_size == batch_size


@pytest.mark.parametrize(
    ("assignment", "value"),
    [("a.b=query: ", "query: "), ("a.b = query: ", "query:"), ("a.b=\t", "\t"), ("a.b= 5 ", 5)],
)
def test_assigned_text_keeps_its_spaces(assignment: str, value: object) -> None:
    """Text keeps its spaces, unless there is one before the equals sign."""
    assert parse_assignments([assignment]) == {"a": {"b": value}}
