"""Names that version 0.1 gave to settings and fields, and the names they have now.

Settings files, ``--set`` options and metrics logs of version 0.1 keep working. A setting under its
old name raises a FutureWarning with the new one. New files always have the new names.
"""

import warnings
from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

#: Table of the settings file -> old key -> new key.
RENAMED_SETTINGS: Mapping[str, Mapping[str, str]] = MappingProxyType(
    {
        "data": {"mask_share": "masking_rate"},
        "optim": {"clip": "max_grad_norm"},
        "schedule": {"least_steps": "min_steps"},
        "run": {"first_weights": "initialization", "micro_tokens": "micro_batch_tokens"},
        "task": {
            "longest_question": "max_question_length",
            "longest_answer": "max_answer_length",
        },
    }
)
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
#: Old field of a line of metrics.jsonl -> new field.
RENAMED_METRICS: Mapping[str, str] = MappingProxyType({"ceiling_share": "mfu"})
#: Old field of a fine-tuning run's result -> new field, if the result has ``figures``.
RENAMED_RESULT_FIELDS: Mapping[str, str] = MappingProxyType(
    {"metrics": "metric_names", "figures": "metrics"}
)


def upgrade_settings(values: Mapping[str, Any], table: str) -> dict[str, Any]:
    """Return the settings of one table under their current names.

    Warns:
        FutureWarning: for every old key or value, with its current name.
    """
    result: dict[str, Any] = {}
    for key, value in values.items():
        name = RENAMED_SETTINGS.get(table, {}).get(key, key)
        if name != key:
            if name in values:
                # Both names: strict validation reports the old one as unknown.
                name = key
            else:
                _warn(f"the setting {table}.{key} is now {table}.{name}; use the new name")
        new_values = RENAMED_VALUES.get((table, name), {})
        if isinstance(value, str) and value in new_values:
            _warn(f"{table}.{name} = {value!r} is now {new_values[value]!r}; use the new value")
            result[name] = new_values[value]
        else:
            result[name] = value
    return result


def downgrade_settings(tables: Mapping[str, Any]) -> dict[str, Any]:
    """Return nested settings under the names of version 0.1, in the order given.

    The lab identifies a stage by a hash over its settings. Hashing the old names keeps results
    that were recorded with version 0.1.
    """
    result: dict[str, Any] = {}
    for table, values in tables.items():
        if not isinstance(values, Mapping):
            result[table] = values
            continue
        old_keys = {new: old for old, new in RENAMED_SETTINGS.get(table, {}).items()}
        old: dict[str, Any] = {}
        for key, value in downgrade_settings(values).items():
            new_values = RENAMED_VALUES.get((table, key), {})
            old_values = {new: previous for previous, new in new_values.items()}
            is_renamed = isinstance(value, str) and value in old_values
            old[old_keys.get(key, key)] = old_values[value] if is_renamed else value
        result[table] = old
    return result


def upgrade_metrics(record: Mapping[str, Any]) -> dict[str, Any]:
    """Return a line of metrics.jsonl under its current names."""
    return {RENAMED_METRICS.get(key, key): value for key, value in record.items()}


def upgrade_finetuning_result(result: Mapping[str, Any]) -> dict[str, Any]:
    """Return a fine-tuning run's result.json, or a copy in the lab's results, in current names."""
    if "figures" not in result:
        return dict(result)
    return {RENAMED_RESULT_FIELDS.get(key, key): value for key, value in result.items()}


def upgrade_lab_record(record: Mapping[str, Any]) -> dict[str, Any]:
    """Return a record of the lab's results under its current names."""
    upgraded = dict(record)
    if isinstance(record.get("result"), Mapping):
        upgraded["result"] = upgrade_finetuning_result(record["result"])
    if isinstance(record.get("again"), list):
        upgraded["again"] = [upgrade_finetuning_result(rerun) for rerun in record["again"]]
    return upgraded


def _warn(message: str) -> None:
    warnings.warn(message, FutureWarning, stacklevel=2)
