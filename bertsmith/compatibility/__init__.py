"""Settings and fields that earlier versions had, and their current names.

Settings files, metrics logs and ``--set`` options of versions 0.1 and 0.2 keep working. A
setting under its old name raises a FutureWarning with the new one. New files always have the new
names.
"""

import warnings
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Any

#: Table of the settings file -> old key -> new key.
RENAMED_SETTINGS: Mapping[str, Mapping[str, str]] = MappingProxyType(
    {
        "data": {
            "length": "max_seqlen",
            "batch": "batch_size",
            "short_share": "short_seq_prob",
            "mask_share": "masking_rate",
            "mask_token_share": "mask_replace_prob",
            "random_share": "random_replace_prob",
            "whole_words": "whole_word_masking",
            "max_predictions": "max_predictions_per_seq",
        },
        "optim": {"clip": "max_grad_norm"},
        "checkpoint": {"every": "steps"},
        "schedule": {
            "least_steps": "min_steps",
            "long_length": "phase2_max_seqlen",
            "long_share": "phase2_fraction",
        },
        "run": {
            "data": "store_path",
            "store": "store_id",
            "first_weights": "initialization",
            "kernel": "attention_kernel",
            "micro_tokens": "micro_batch_tokens",
            "eval_sequences": "max_eval_sequences",
            "log_gradients": "log_grad_norms",
            "evaluate": "eval_strategy",
            "choose": "model_selection",
            "freeze": "num_frozen_layers",
        },
        "serve": {
            "body_bytes": "max_body_bytes",
            "texts": "max_texts",
            "tokens": "max_tokens",
            "masks": "max_masks",
            "numbers": "max_vector_elements",
            "header_bytes": "max_header_bytes",
            "body_seconds": "body_timeout_seconds",
            "seconds": "request_timeout_seconds",
            "queue_tokens": "max_queue_tokens",
            "requests": "max_concurrent_requests",
            "batch_tokens": "max_batch_tokens",
            "wait_ms": "max_wait_ms",
            "stop_seconds": "shutdown_timeout_seconds",
        },
        "task": {
            "train": "train_file",
            "heldout": "validation_files",
            "heldout_share": "validation_fraction",
            "heldout_fold": "validation_fold",
            "examples": "max_train_examples",
            "examples_draw": "train_subset",
            "examples_seed": "train_subset_seed",
            "text": "text_column",
            "pair": "pair_column",
            "label": "label_column",
            "id": "id_column",
            "endings": "ending_columns",
            "answers": "label_file_suffix",
            "unit": "tag_level",
            "length": "max_seqlen",
            "stride": "window_stride",
            "overlap": "window_overlap",
            "longest_question": "max_question_length",
            "longest_answer": "max_answer_length",
            "batch": "batch_size",
            "skip_bad": "skip_invalid",
        },
    }
)
#: Table of the settings file -> keys that have been removed. Their values are ignored.
REMOVED_SETTINGS: Mapping[str, frozenset[str]] = MappingProxyType(
    {
        # A run with a time budget had a number of steps, which it revised at most once.
        "schedule": frozenset({"replanned_at", "planned_steps"}),
        # The web page had event streams.
        "serve": frozenset({"max_page_streams", "pages"}),
    }
)
#: Settings of the table [schedule] that have an effect in pre-training only. Fine-tuning runs of
#: version 0.2 accepted and stored them too.
PRETRAINING_SCHEDULE_SETTINGS = frozenset(
    {
        "batch_ramp_fraction",
        "phase2_max_seqlen",
        "phase2_fraction",
        "causal_fraction",
        "neighbor_bias_steps",
    }
)
#: Tables that only settings files of fine-tuning and distillation have.
_FINETUNING_TABLES = frozenset({"task", "embedding", "reranking", "distill"})
#: (Table, new key) -> old value -> new value.
RENAMED_VALUES: Mapping[tuple[str, str], Mapping[str, str]] = MappingProxyType(
    {
        ("run", "initialization"): {
            "informed": "unigram",
            "beside": "neighbor-heads",
            "across": "cross-segment-heads",
        },
    }
)
#: Command -> old option -> new option.
RENAMED_OPTIONS: Mapping[str, Mapping[str, str]] = MappingProxyType(
    {
        "finetune": {
            "--batch": "--batch-size",
            "--length": "--max-seqlen",
            "--skip-bad": "--skip-invalid",
        },
        "predict": {"--skip-bad": "--skip-invalid"},
        "evaluate": {"--skip-bad": "--skip-invalid"},
        "similar": {"--skip-bad": "--skip-invalid"},
    }
)
#: Command -> flags of earlier versions that have no effect any more.
REMOVED_FLAGS: Mapping[str, frozenset[str]] = MappingProxyType({"embed": frozenset({"--resume"})})
#: Old field of a line of metrics.jsonl -> new field.
RENAMED_METRICS: Mapping[str, str] = MappingProxyType(
    {
        "ceiling_share": "mfu",
        "masked_lm": "mlm_loss",
        "masked_accuracy": "mlm_accuracy",
        "next_sentence": "nsp_loss",
        "next_sentence_accuracy": "nsp_accuracy",
        "next_sentence_low": "nsp_accuracy_low",
        "next_sentence_high": "nsp_accuracy_high",
        "larger_class": "nsp_majority_accuracy",
        "gradients": "grad_norms",
    }
)
#: Old field of a fine-tuning run's result -> new field, if the result has ``figures``.
RENAMED_RESULT_FIELDS: Mapping[str, str] = MappingProxyType(
    {"metrics": "metric_names", "figures": "metrics"}
)
#: Old field of the counts of a file's examples, in a fine-tuning result -> new field.
RENAMED_COUNTS: Mapping[str, str] = MappingProxyType(
    {
        "read": "num_read",
        "used": "num_used",
        "cut_off": "num_truncated",
        "unseen": "unseen_labels",
        "unreached": "num_unreachable_answers",
        "untaught": "num_without_target",
    }
)
#: Old field of results.json, which a sweep writes -> new field.
RENAMED_SWEEP_FIELDS: Mapping[str, str] = MappingProxyType({"settings": "points"})
#: Old field of a grid point in results.json -> new field.
RENAMED_GRID_POINT_FIELDS: Mapping[str, str] = MappingProxyType(
    {"chosen": "hyperparameters", "least": "min", "greatest": "max"}
)
#: Old field of ``TokenizerSpec`` -> new field. The old names are part of a vocabulary's hash.
RENAMED_TOKENIZER_FIELDS: Mapping[str, str] = MappingProxyType(
    {"whole_hangul": "keep_hangul_syllables", "longest_word": "max_word_chars"}
)

#: Old key of a model's bertsmith.json -> new key.
RENAMED_MODEL_INFO: Mapping[str, str] = MappingProxyType(
    {"heldout": "heldout_metrics", "extended": "vocab_extensions", "new": "newly_initialized"}
)
#: Old key of an entry of ``vocab_extensions`` in bertsmith.json -> new key.
RENAMED_VOCAB_EXTENSION: Mapping[str, str] = MappingProxyType(
    {"words": "num_words", "first": "first_id"}
)
#: Old key of ``imported`` in bertsmith.json, which describes a TensorFlow checkpoint -> new key.
RENAMED_IMPORT_REPORT: Mapping[str, str] = MappingProxyType(
    {
        "from": "source",
        "new": "newly_initialized",
        "left": "unused",
        "left_of_training": "num_training_state_tensors",
    }
)
#: Old key of the settings of embedded lines, in index.json and in state.json -> new key.
RENAMED_EMBEDDING_SETTINGS: Mapping[str, str] = MappingProxyType(
    {"path": "model_path", "model": "model_sha256", "special": "include_special_tokens"}
)
#: Old key of state.json, the state of an unfinished ``embed --out`` -> new key.
RENAMED_EMBEDDING_STATE: Mapping[str, str] = MappingProxyType(
    {
        "lines": "num_lines",
        "read": "lines_sha256",
        "place": "position",
        "cut_off": "num_truncated",
    }
)
#: Current name of a file of an index -> its name in version 0.1.
OLD_INDEX_FILES: Mapping[str, str] = MappingProxyType({"offsets.npy": "places.npy"})
#: Flags of ``embed --special-tokens`` and ``--no-special-tokens`` in version 0.1.
OLD_SPECIAL_TOKENS_FLAGS = "--special/--no-special"
#: Old field of a request to the server -> new field.
RENAMED_REQUEST_FIELDS: Mapping[str, str] = MappingProxyType({"special": "include_special_tokens"})


def upgrade_settings(values: Mapping[str, Any], table: str, *, warn: bool = True) -> dict[str, Any]:
    """Return the settings of one table under their current names.

    Args:
        values: The settings of the table.
        table: Name of the table, such as "optim".
        warn: Whether to warn; False for settings that a run has stored.

    Warns:
        FutureWarning: for every old key or value, with its current name, and every removed key.
    """
    result: dict[str, Any] = {}
    removed_keys = REMOVED_SETTINGS.get(table, frozenset())
    for key, value in values.items():
        if key in removed_keys:
            if warn:
                _warn(f"the setting {table}.{key} has been removed; leave it out")
            continue
        name = RENAMED_SETTINGS.get(table, {}).get(key, key)
        if name != key:
            if name in values:
                # With both names, keep the old one, which strict validation reports as unknown.
                name = key
            elif warn:
                _warn(f"the setting {table}.{key} is now {table}.{name}; use the new name")
        new_values = RENAMED_VALUES.get((table, name), {})
        if isinstance(value, str) and value in new_values:
            if warn:
                _warn(f"{table}.{name} = {value!r} is now {new_values[value]!r}; use the new value")
            result[name] = new_values[value]
        else:
            result[name] = value
    return result


def upgrade_arguments(arguments: Sequence[str]) -> list[str]:
    """Return command line arguments with the current names of options, without removed flags.

    Warns:
        FutureWarning: for every old option, with its current name, and for every removed flag.
    """
    # The command is the first argument that is not an option.
    command = next((argument for argument in arguments if not argument.startswith("-")), "")
    options = RENAMED_OPTIONS.get(command, {})
    removed_flags = REMOVED_FLAGS.get(command, frozenset())
    upgraded: list[str] = []
    for index, argument in enumerate(arguments):
        if argument == "--":
            return upgraded + list(arguments[index:])
        option, equals, value = argument.partition("=")
        if argument in removed_flags:
            _warn(f"the option {argument} is no longer needed; leave it out")
        elif option in options:
            _warn(f"the option {option} is now {options[option]}; use the new name")
            upgraded.append(options[option] + equals + value)
        else:
            upgraded.append(argument)
    return upgraded


def upgrade_tables(tables: Mapping[str, Any], *, warn: bool = True) -> dict[str, Any]:
    """Return all tables of settings under their current names; see ``upgrade_settings``."""
    return {
        name: upgrade_settings(table, name, warn=warn) if isinstance(table, Mapping) else table
        for name, table in tables.items()
    }


def upgrade_file(tables: Mapping[str, Any], *, warn: bool = True) -> dict[str, Any]:
    """Return the tables of a settings file under their current names; see ``upgrade_settings``.

    Settings of pre-training are removed from the file of a fine-tuning run.

    Args:
        tables: The content of the file.
        warn: Whether to warn; False for settings that a run has stored.

    Warns:
        FutureWarning: for every old or removed setting.
    """
    upgraded = upgrade_tables(tables, warn=warn)
    schedule = upgraded.get("schedule")
    if not isinstance(schedule, Mapping) or _FINETUNING_TABLES.isdisjoint(upgraded):
        return upgraded
    for key in sorted(PRETRAINING_SCHEDULE_SETTINGS & schedule.keys()):
        if warn:
            _warn(f"the setting schedule.{key} has no effect in fine-tuning; leave it out")
    upgraded["schedule"] = {
        key: value for key, value in schedule.items() if key not in PRETRAINING_SCHEDULE_SETTINGS
    }
    return upgraded


def downgrade_settings(tables: Mapping[str, Any]) -> dict[str, Any]:
    """Return nested settings under the names of version 0.1, in unchanged order.

    The lab identifies a stage by a hash over its settings. Hashing the old names keeps results
    that were recorded with version 0.1.
    """
    result: dict[str, Any] = {}
    for table, values in tables.items():
        if not isinstance(values, Mapping):
            result[table] = values
            continue
        old_keys = invert(RENAMED_SETTINGS.get(table, {}))
        old_settings: dict[str, Any] = {}
        for key, value in downgrade_settings(values).items():
            old_values = invert(RENAMED_VALUES.get((table, key), {}))
            is_renamed = isinstance(value, str) and value in old_values
            old_settings[old_keys.get(key, key)] = old_values[value] if is_renamed else value
        result[table] = old_settings
    return result


def upgrade_metrics(record: Mapping[str, Any]) -> dict[str, Any]:
    """Return a line of metrics.jsonl under its current names."""
    return {RENAMED_METRICS.get(key, key): value for key, value in record.items()}


def upgrade_model_info(info: Mapping[str, Any]) -> dict[str, Any]:
    """Return the content of a model's bertsmith.json under its current keys."""
    upgraded = rename_keys(info, RENAMED_MODEL_INFO)
    if isinstance(upgraded.get("vocab_extensions"), list):
        upgraded["vocab_extensions"] = [
            rename_keys(extension, RENAMED_VOCAB_EXTENSION)
            for extension in upgraded["vocab_extensions"]
            if isinstance(extension, Mapping)
        ]
    if isinstance(upgraded.get("imported"), Mapping):
        upgraded["imported"] = rename_keys(upgraded["imported"], RENAMED_IMPORT_REPORT)
    if isinstance(upgraded.get("heldout_metrics"), Mapping):
        upgraded["heldout_metrics"] = upgrade_metrics(upgraded["heldout_metrics"])
    provenance = upgraded.get("provenance")
    if isinstance(provenance, Mapping):
        # Fine-tuning stores its tables here, pre-training in ``settings``.
        upgraded["provenance"] = upgrade_tables(provenance, warn=False)
        if isinstance(provenance.get("settings"), Mapping):
            tables = upgrade_tables(provenance["settings"], warn=False)
            upgraded["provenance"]["settings"] = tables
    return upgraded


def upgrade_embedding_settings(settings: Mapping[str, Any]) -> dict[str, Any]:
    """Return the settings of embedded lines under their current keys."""
    return rename_keys(settings, RENAMED_EMBEDDING_SETTINGS)


def upgrade_embedding_state(state: Mapping[str, Any]) -> dict[str, Any]:
    """Return the state of an unfinished ``embed --out`` under its current keys."""
    upgraded = rename_keys(state, RENAMED_EMBEDDING_STATE)
    if isinstance(upgraded.get("settings"), Mapping):
        upgraded["settings"] = upgrade_embedding_settings(upgraded["settings"])
    return upgraded


def find_index_file(index: Path, name: str) -> Path:
    """Return the path of a file of an index, which may have its name of version 0.1.

    If neither file exists, the path has the current name.
    """
    old_path = index / OLD_INDEX_FILES.get(name, name)
    return old_path if old_path.is_file() and not (index / name).exists() else index / name


def upgrade_request(body: Mapping[str, Any], fields: Collection[str]) -> dict[str, Any]:
    """Return the body of a request to the server under its current fields.

    Args:
        body: The body.
        fields: The current fields of the endpoint. An old field keeps its name if the endpoint does
            not have its new name, or if the body has both names. Validation then rejects the old
            field as unknown.
    """
    names = {old: new for old, new in RENAMED_REQUEST_FIELDS.items()
             if new in fields and new not in body}  # fmt: skip
    return rename_keys(body, names)


def upgrade_finetuning_result(result: Mapping[str, Any]) -> dict[str, Any]:
    """Return a fine-tuning result, of a result.json or of the lab, under its current names."""
    upgraded = dict(result)
    if "figures" in result:
        upgraded = rename_keys(result, RENAMED_RESULT_FIELDS)
    if isinstance(upgraded.get("counts"), Mapping):
        upgraded["counts"] = _upgrade_counts(upgraded["counts"])
    return upgraded


def upgrade_sweep_results(results: Mapping[str, Any]) -> dict[str, Any]:
    """Return the content of a sweep's results.json under its current names."""
    upgraded = rename_keys(results, RENAMED_SWEEP_FIELDS)
    if isinstance(upgraded.get("points"), list):
        upgraded["points"] = [
            rename_keys(point, RENAMED_GRID_POINT_FIELDS) for point in upgraded["points"]
        ]
    if isinstance(upgraded.get("counts"), Mapping):
        upgraded["counts"] = _upgrade_counts(upgraded["counts"])
    return upgraded


def downgrade_tokenizer_spec(values: Mapping[str, Any]) -> dict[str, Any]:
    """Return the fields of a ``TokenizerSpec`` under the names of version 0.1."""
    return rename_keys(values, invert(RENAMED_TOKENIZER_FIELDS))


def _upgrade_counts(counts: Mapping[str, Any]) -> dict[str, Any]:
    """Return the example counts of each file under their current names."""
    return {
        file: rename_keys(values, RENAMED_COUNTS) if isinstance(values, Mapping) else values
        for file, values in counts.items()
    }


def rename_keys(values: Mapping[str, Any], names: Mapping[str, str]) -> dict[str, Any]:
    """Return a copy of a dictionary with some keys renamed."""
    return {names.get(key, key): value for key, value in values.items()}


def invert(names: Mapping[str, str]) -> dict[str, str]:
    """Return a mapping from new to old names, from a mapping from old to new names."""
    return {new: old for old, new in names.items()}


def _warn(message: str) -> None:
    warnings.warn(message, FutureWarning, stacklevel=2)
