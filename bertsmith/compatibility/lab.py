"""Names that version 0.1 gave to the stages, records and results of the lab."""

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

from bertsmith.compatibility import (
    RENAMED_METRICS,
    downgrade_settings,
    invert,
    rename_keys,
    upgrade_finetuning_result,
    upgrade_settings,
)

#: Old kind of a lab stage -> new kind.
RENAMED_STAGE_KINDS: Mapping[str, str] = MappingProxyType(
    {
        "words": "vocabulary",
        "begun": "initialized-model",
        "filled": "mask-predictions",
        "senses": "word-senses",
    }
)
#: Old role of a lab stage's dependency -> new role.
RENAMED_STAGE_ROLES: Mapping[str, str] = MappingProxyType({"words": "vocabulary"})
#: New kind of a lab stage -> old setting -> new setting.
RENAMED_STAGE_SETTINGS: Mapping[str, Mapping[str, str]] = MappingProxyType(
    {
        "text": {"characters": "max_characters"},
        "mask-predictions": {"top": "top_k"},
        "layer-similarity": {"most": "max_pairs"},
        "sentence-map": {"most": "max_sentences"},
        "position-map": {"most": "max_positions"},
        "softmax": {
            "words": "vocab_sizes",
            "predictions": "num_predictions",
            "times": "num_repeats",
        },
    }
)
#: Old field of a stage's record in the lab's results -> new field.
RENAMED_RECORD_FIELDS: Mapping[str, str] = MappingProxyType(
    {
        "needs": "dependencies",
        "made_of": "input_provenance",
        "again": "reruns",
        "outcome": "has_output",
    }
)
#: Old field of the machine in a record of the lab -> new field.
RENAMED_MACHINE_FIELDS: Mapping[str, str] = MappingProxyType({"auto": "auto_device"})
#: New kind of a lab stage -> old field at any depth of its result -> new field.
RENAMED_STAGE_RESULTS: Mapping[str, Mapping[str, str]] = MappingProxyType(
    {
        "vocabulary": {
            "words": "vocab_size",
            "unknown_share": "unk_rate",
            "pieces_a_word": "tokens_per_word",
            "whole_share": "single_token_rate",
        },
        "pretrain": {
            "heldout": "heldout_metrics",
            "parameters": "num_parameters",
            "training": "training_curve",
            "gradients": "gradient_norms",
            **{old: new for old, new in RENAMED_METRICS.items() if old != "gradients"},
        },
        "mask-predictions": {"filled": "predictions"},
        "word-senses": {
            "words": "measured_words",
            "same": "same_sense",
            "other": "different_senses",
            "parted": "auc",
        },
        "layer-similarity": {"layers": "spearman", "pairs": "num_pairs"},
        "sentence-map": {"maps": "points", "parted": "nearest_neighbor_accuracy"},
        "position-map": {"map": "similarities", "by_distance": "mean_similarity_by_distance"},
        "softmax": {"words": "vocab_size", "whole": "full", "parts": "chunked"},
    }
)
#: Name of a stage's output in its directory, as version 0.1 wrote it.
OLD_STAGE_OUTPUT = "outcome"
#: Prefix in the file names of the lab's reports about a user's model, as version 0.1 wrote it.
OLD_MODEL_REPORT_PREFIX = "given-"


def downgrade_stage_key(content: Mapping[str, Any]) -> dict[str, Any]:
    """Return the content that identifies a lab stage, under the names of version 0.1.

    The lab identifies a stage by the hash of this content. With the old names, the hash is the same
    as in version 0.1, so recorded results stay valid.

    Args:
        content: The stage's ``kind``, ``settings``, ``dependencies`` (keys by role) and ``files``
            (hashes by role), and its ``version`` unless it is the first.
    """
    kind = content["kind"]
    settings = downgrade_settings(content["settings"])
    result = {
        "kind": invert(RENAMED_STAGE_KINDS).get(kind, kind),
        "settings": rename_keys(settings, invert(RENAMED_STAGE_SETTINGS.get(kind, {}))),
        "needs": rename_keys(content["dependencies"], invert(RENAMED_STAGE_ROLES)),
        "files": content["files"],
    }
    if "version" in content:
        result["form"] = content["version"]
    return result


def upgrade_stage_name(name: str) -> str:
    """Return the name of a lab stage with its current kind."""
    kind, separator, key = name.rpartition("-")
    return f"{RENAMED_STAGE_KINDS.get(kind, kind)}{separator}{key}"


def downgrade_stage_name(name: str) -> str:
    """Return the name of a lab stage with the kind that version 0.1 used."""
    kind, separator, key = name.rpartition("-")
    return f"{invert(RENAMED_STAGE_KINDS).get(kind, kind)}{separator}{key}"


def upgrade_lab_record(record: Mapping[str, Any]) -> dict[str, Any]:
    """Return a record of the lab's results under its current names."""
    upgraded = _upgrade_record_fields(record)
    if "name" in upgraded:
        upgraded["name"] = upgrade_stage_name(upgraded["name"])
    old_kind = record.get("kind", "")
    kind = RENAMED_STAGE_KINDS.get(old_kind, old_kind)
    if "kind" in upgraded:
        upgraded["kind"] = kind
    if "settings" in upgraded:
        settings = rename_keys(record["settings"], RENAMED_STAGE_SETTINGS.get(kind, {}))
        upgraded["settings"] = _upgrade_nested_settings(settings)
    if "dependencies" in upgraded:
        dependencies = rename_keys(upgraded["dependencies"], RENAMED_STAGE_ROLES)
        upgraded["dependencies"] = {role: upgrade_stage_name(name)
                                    for role, name in dependencies.items()}  # fmt: skip
    result_fields = RENAMED_STAGE_RESULTS.get(kind, {})
    if isinstance(record.get("result"), Mapping):
        result = upgrade_finetuning_result(record["result"])
        upgraded["result"] = _rename_nested_keys(result, result_fields)
    if "reruns" in upgraded:
        reruns = []
        for rerun in upgraded["reruns"]:
            fields = upgrade_finetuning_result(_upgrade_record_fields(rerun))
            reruns.append(_rename_nested_keys(fields, result_fields))
        upgraded["reruns"] = reruns
    return upgraded


def _upgrade_nested_settings(settings: Mapping[str, Any]) -> dict[str, Any]:
    """Return nested settings under their current names, without warnings."""
    result: dict[str, Any] = {}
    for table, values in settings.items():
        if isinstance(values, Mapping):
            upgraded = _upgrade_nested_settings(values)
            result[table] = upgrade_settings(upgraded, table, warn=False)
        else:
            result[table] = values
    return result


def _upgrade_record_fields(record: Mapping[str, Any]) -> dict[str, Any]:
    """Rename the fields of a lab record, its machine and the provenance of its inputs."""
    upgraded = rename_keys(record, RENAMED_RECORD_FIELDS)
    if "machine" in upgraded:
        upgraded["machine"] = rename_keys(upgraded["machine"], RENAMED_MACHINE_FIELDS)
    if "input_provenance" in upgraded:
        provenance = rename_keys(upgraded["input_provenance"], RENAMED_STAGE_ROLES)
        upgraded["input_provenance"] = {role: _upgrade_record_fields(fields)
                                        for role, fields in provenance.items()}  # fmt: skip
    return upgraded


def _rename_nested_keys(value: Any, names: Mapping[str, str]) -> Any:
    """Rename the keys of a JSON value at any depth."""
    if isinstance(value, Mapping):
        return {names.get(key, key): _rename_nested_keys(item, names)
                for key, item in value.items()}  # fmt: skip
    if isinstance(value, list):
        return [_rename_nested_keys(item, names) for item in value]
    return value
