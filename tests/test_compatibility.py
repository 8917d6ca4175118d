"""Settings and metrics of earlier versions."""

import json
import shutil
import warnings
from pathlib import Path
from typing import Any

import pytest

from bertsmith.bundle import load_fine_tuned
from bertsmith.compatibility import (
    PRETRAINING_SCHEDULE_SETTINGS,
    RENAMED_SETTINGS,
    downgrade_settings,
    upgrade_arguments,
    upgrade_finetuning_result,
    upgrade_metrics,
    upgrade_model_info,
    upgrade_settings,
    upgrade_sweep_results,
)
from bertsmith.compatibility.lab import upgrade_lab_record
from bertsmith.data.settings import DataSettings
from bertsmith.errors import SettingsError
from bertsmith.serve.settings import ServeSettings
from bertsmith.settings import load_user_settings, read_stored_settings
from bertsmith.tasks.families import get_task_settings
from bertsmith.tasks.settings import TaskSettings
from bertsmith.text.tokenizer_spec import SPECIAL_TOKENS, TokenizerSpec
from bertsmith.train.engine.schedule import ScheduleSettings
from bertsmith.train.engine.settings import CheckpointSettings, FinetuneRunSettings, OptimSettings
from bertsmith.train.pretraining.recipes import RunSettings as PretrainRunSettings
from bertsmith.train.pretraining.schedule import PretrainScheduleSettings

#: Subclasses of SettingsTable with all keys. The table [run] has two: of pre-training and of
#: fine-tuning.
SETTINGS_TABLES = (
    DataSettings, OptimSettings, PretrainScheduleSettings, PretrainRunSettings,
    CheckpointSettings, FinetuneRunSettings, TaskSettings, ServeSettings,
)  # fmt: skip


def test_old_keys_are_read_and_warned_about() -> None:
    """An old key sets the renamed field; the warning names the new key."""
    with pytest.warns(FutureWarning, match=r"optim\.clip is now optim\.max_grad_norm"):
        settings = OptimSettings.parse({"lr": 1e-3, "clip": 0.25}, "a file")
    assert settings.max_grad_norm == 0.25


@pytest.mark.parametrize("key", ["pages", "max_page_streams"])
def test_removed_limit_of_the_page_is_ignored(key: str) -> None:
    """A command with the limit of event streams, which the page no longer has, still works."""
    with pytest.warns(FutureWarning, match=rf"serve\.{key} has been removed"):
        assert ServeSettings.parse({key: 5}, "a file") == ServeSettings()


def test_fine_tuning_files_may_have_settings_of_pretraining(tmp_path: Path) -> None:
    """Settings of pre-training, which had no effect, are removed from files of fine-tuning."""
    path = tmp_path / "settings.toml"
    path.write_text("[task]\n[schedule]\nsteps = 7\nphase2_fraction = 0.5\nlong_length = 64\n")
    assert read_stored_settings(path)["schedule"] == {"steps": 7}
    with pytest.warns(FutureWarning, match=r"schedule\.phase2_fraction has no effect in fine-tun"):
        assert load_user_settings(path)["schedule"] == {"steps": 7}
    path.write_text("[data]\n[schedule]\nphase2_fraction = 0.5\n")
    assert read_stored_settings(path)["schedule"] == {"phase2_fraction": 0.5}


def test_fine_tuning_rejects_settings_of_pretraining() -> None:
    """Exactly the settings that ``PretrainScheduleSettings`` adds are errors in fine-tuning."""
    added = PretrainScheduleSettings.model_fields.keys() - ScheduleSettings.model_fields.keys()
    assert added == PRETRAINING_SCHEDULE_SETTINGS
    for key in added:
        with pytest.raises(SettingsError, match=f"^here: {key} has an effect only in pre-train"):
            ScheduleSettings.parse({key: 0}, "here")


def test_old_values_are_read_and_warned_about() -> None:
    """An old value of a renamed setting becomes its current value."""
    with pytest.warns(FutureWarning, match="'beside' is now 'neighbor-heads'"):
        settings = PretrainRunSettings.parse({"first_weights": "beside"}, "a file")
    assert settings.initialization == "neighbor-heads"


def test_old_names_in_a_file_and_in_assignments_are_upgraded(tmp_path: Path) -> None:
    """Old names in a settings file and in ``--set`` are merged under the new names."""
    config = tmp_path / "settings.toml"
    config.write_text("[run]\nmicro_tokens = 512\n")
    with pytest.warns(FutureWarning):
        old = load_user_settings(config, {}, ["optim.clip=0.5"])
    assert old == {"run": {"micro_batch_tokens": 512}, "optim": {"max_grad_norm": 0.5}}


def test_old_key_in_a_file_can_be_overridden(tmp_path: Path) -> None:
    """A new name in ``--set`` overrides an old name in a settings file, and vice versa."""
    config = tmp_path / "settings.toml"
    for key, assignment in (("batch", "task.batch_size=8"), ("batch_size", "task.batch=8")):
        config.write_text(f"[task]\n{key} = 16\n")
        with pytest.warns(FutureWarning, match=r"task\.batch is now task\.batch_size"):
            assert load_user_settings(config, {}, [assignment]) == {"task": {"batch_size": 8}}


def test_stored_settings_are_read_without_warnings(tmp_path: Path) -> None:
    """A run's settings.toml and a model's bertsmith.json of version 0.1 get the current names."""
    path = tmp_path / "settings.toml"
    path.write_text("[data]\nbatch = 4\n[run]\nstore = 'abc'\ndata = 'a/b'\n")
    expected = {"data": {"batch_size": 4}, "run": {"store_id": "abc", "store_path": "a/b"}}
    info = {
        "provenance": {"settings": {"data": {"batch": 4}}, "tokens": 7, "task": {"pair": "b"}},
        "heldout": {"ceiling_share": 0.5},
    }
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert read_stored_settings(path) == expected
        upgraded = upgrade_model_info(info)
    assert upgraded["heldout_metrics"] == {"mfu": 0.5}
    assert upgraded["provenance"] == {
        "settings": {"data": {"batch_size": 4}}, "tokens": 7, "task": {"pair_column": "b"},
    }  # fmt: skip


def test_old_options_are_accepted() -> None:
    """An old option of a command becomes the new one; values and other commands stay unchanged."""
    with pytest.warns(FutureWarning, match="the option --batch is now --batch-size"):
        upgraded = upgrade_arguments(["finetune", "rte", "--batch=16", "--text", "a"])
    assert upgraded == ["finetune", "rte", "--batch-size=16", "--text", "a"]
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert upgrade_arguments(["inspect", "--length", "8"]) == ["inspect", "--length", "8"]
        assert upgrade_arguments(["predict", "--", "--skip-bad"])[-1] == "--skip-bad"
        assert upgrade_arguments(["lab", "--resume"]) == ["lab", "--resume"]


def test_misspelled_old_key_suggests_the_current_name() -> None:
    """For a misspelled old key, the error suggests the current key."""
    with pytest.raises(SettingsError, match="'clipp'; did you mean 'max_grad_norm'"):
        OptimSettings.parse({"lr": 1e-3, "clipp": 0.25}, "a file")


def test_both_names_at_once_are_an_error() -> None:
    """A table with both the old and the new key is an error."""
    with pytest.raises(SettingsError, match="clip"):
        OptimSettings.parse({"lr": 1e-3, "clip": 0.25, "max_grad_norm": 1.0}, "a file")


def test_current_names_give_no_warning() -> None:
    """Settings under their current names are unchanged and give no warning."""
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for table, names in RENAMED_SETTINGS.items():
            current = dict.fromkeys(names.values(), 1)
            assert upgrade_settings(current, table) == current


def test_downgrade_inverts_upgrade() -> None:
    """Downgrading upgraded settings returns the old settings, also in nested tables."""
    old: dict[str, Any] = {
        "values": {"task": {"longest_question": 16}},
        "run": {"first_weights": "across"},
    }
    with pytest.warns(FutureWarning):
        new = {
            "values": {"task": upgrade_settings(old["values"]["task"], "task")},
            "run": upgrade_settings(old["run"], "run"),
        }
    assert new != old
    assert downgrade_settings(new) == old


def test_renamed_settings_map_to_existing_fields() -> None:
    """Each renamed key maps to a field of a settings class of its table; old names are unused."""
    for table, names in RENAMED_SETTINGS.items():
        classes = [cls for cls in SETTINGS_TABLES if cls.table == table]
        assert classes, table
        fields = {field for cls in classes for field in cls.model_fields}
        assert set(names.values()) <= fields
        assert not set(names) & fields


def test_metrics_of_version_0_1_are_read() -> None:
    """A field of an old metrics.jsonl gets its current name; other fields stay."""
    old = {"step": 1, "ceiling_share": 0.5, "masked_lm": 2.0, "gradients": {"heads": 1.0}}
    current = {"step": 1, "mfu": 0.5, "mlm_loss": 2.0, "grad_norms": {"heads": 1.0}}
    assert upgrade_metrics(old) == current


def test_counts_and_sweeps_of_version_0_1_are_read() -> None:
    """The counts of a result and the grid points of a sweep get their current names."""
    counts = {"train": {"read": 3, "cut_off": 1, "skipped": {}}}
    current_counts = {"train": {"num_read": 3, "num_truncated": 1, "skipped": {}}}
    assert upgrade_finetuning_result({"step": 3, "counts": counts})["counts"] == current_counts
    point = {"chosen": {"optim.lr": 1e-4}, "median": 0.5, "least": 0.4, "greatest": 0.6, "runs": {}}
    current_point = {
        "hyperparameters": {"optim.lr": 1e-4}, "median": 0.5, "min": 0.4, "max": 0.6, "runs": {},
    }  # fmt: skip
    old = {"metric": "f1", "settings": [point], "counts": counts}
    current = {"metric": "f1", "points": [current_point], "counts": current_counts}
    assert upgrade_sweep_results(old) == current
    assert upgrade_sweep_results(current) == current


def test_vocabulary_hash_is_that_of_version_0_1() -> None:
    """Renamed fields of the tokenizer do not change the hash that version 0.1 computed."""
    spec = TokenizerSpec(vocab=(*SPECIAL_TOKENS, "a"), max_word_chars=50, strip_accents=True)
    assert spec.fingerprint() == (
        "68700b22ead9f54bda3109388a7e50ff392adacd153f476dbc929792558b4326"
    )


def test_finetuning_results_of_version_0_1_are_read() -> None:
    """``metrics`` were the names and ``figures`` the values; current results stay unchanged."""
    old = {"step": 3, "metrics": ["f1"], "figures": {"f1": 0.5}}
    current = {"step": 3, "metric_names": ["f1"], "metrics": {"f1": 0.5}}
    assert upgrade_finetuning_result(old) == current
    assert upgrade_finetuning_result(current) == current


def test_lab_records_of_version_0_1_are_read() -> None:
    """The result of a record and those of its repetitions get the current names."""
    old = {
        "name": "finetune-1",
        "result": {"metrics": ["f1"], "figures": {"f1": 0.5}},
        "again": [{"date": "2026-01-01", "figures": {"f1": 0.6}}],
    }
    assert upgrade_lab_record(old) == {
        "name": "finetune-1",
        "result": {"metric_names": ["f1"], "metrics": {"f1": 0.5}},
        "reruns": [{"date": "2026-01-01", "metrics": {"f1": 0.6}}],
    }


def test_model_info_of_version_0_1_is_read() -> None:
    """Keys of bertsmith.json get their current names; settings in the provenance too."""
    old = {
        "heldout": {"f1": 0.5},
        "extended": [{"words": 2, "first": 66, "source": "terms.txt"}],
        "new": ["output.bias"],
        "imported": {"from": "a checkpoint", "case": "cased", "new": [], "left": ["x"],
                     "left_of_training": 3},
        "provenance": {"task": {"heldout": {"dev": "dev.csv"}}},
    }  # fmt: skip
    current = {
        "heldout_metrics": {"f1": 0.5},
        "vocab_extensions": [{"num_words": 2, "first_id": 66, "source": "terms.txt"}],
        "newly_initialized": ["output.bias"],
        "imported": {"source": "a checkpoint", "case": "cased", "newly_initialized": [],
                     "unused": ["x"], "num_training_state_tensors": 3},
        "provenance": {"task": {"validation_files": {"dev": "dev.csv"}}},
    }  # fmt: skip
    assert upgrade_model_info(old) == current
    assert upgrade_model_info(current) == current


def test_null_threshold_of_version_0_1_is_used(tmp_path: Path) -> None:
    """The threshold tuned by version 0.1 is used for predictions."""
    model = Path(__file__).parent / "cli" / "fixtures" / "v0.1" / "answer" / "model"
    copy = shutil.copytree(model, tmp_path / "model")
    info = json.loads((copy / "bertsmith.json").read_text())
    info["heldout"]["null_threshold"] = -7.5
    (copy / "bertsmith.json").write_text(json.dumps(info))
    assert get_task_settings(load_fine_tuned(copy)).null_threshold == -7.5


def test_server_settings_of_version_0_1_are_read() -> None:
    """Old limits of the server set the renamed ones, with a warning."""
    with pytest.warns(FutureWarning, match=r"serve\.texts is now serve\.max_texts"):
        settings = ServeSettings.parse({"texts": 7, "seconds": 1.5}, "--set serve")
    assert (settings.max_texts, settings.request_timeout_seconds) == (7, 1.5)
