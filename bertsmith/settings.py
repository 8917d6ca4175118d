"""Strict, typed, frozen settings, read from and written to TOML."""

import difflib
import tomllib
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from types import UnionType
from typing import Any, ClassVar, Self, TypeVar, get_args, get_origin

import tomli_w
from pydantic import BaseModel, ConfigDict, ValidationError, model_validator

from bertsmith.compatibility import RENAMED_SETTINGS, upgrade_file, upgrade_settings, upgrade_tables
from bertsmith.errors import SettingsError
from bertsmith.files import describe_missing_path


class Settings(BaseModel):
    """Base class of settings and stored metadata: frozen and strict; unknown keys are errors."""

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True)

    @classmethod
    def parse(cls, values: Mapping[str, Any], source: str) -> Self:
        """Validate ``values`` and return them as settings.

        Raises SettingsError with ``source`` and the invalid keys. For an unknown key, the message
        suggests the most similar valid key.
        """
        try:
            return cls.model_validate(dict(values))
        except ValidationError as error:
            raise SettingsError(_format_validation_error(cls, error, source)) from None

    def to_toml(self) -> str:
        """Return the settings as TOML, without keys whose value is None."""
        return tomli_w.dumps(_remove_none(self.model_dump(mode="json")))


SettingsType = TypeVar("SettingsType", bound=Settings)


class SettingsTable(Settings):
    """A named table of a settings file, such as ``[optim]``. Keys of earlier versions work."""

    #: The name of the table, such as ``optim``.
    table: ClassVar[str]

    @model_validator(mode="before")
    @classmethod
    def _upgrade(cls, values: Any) -> Any:
        return upgrade_settings(values, cls.table) if isinstance(values, dict) else values


def read_toml(path: Path, kind: str = "settings file") -> dict[str, Any]:
    """Read a TOML file. Raises SettingsError with the file and the line.

    ``kind`` is what the error calls a missing file.
    """
    try:
        with path.open("rb") as file:
            return tomllib.load(file)
    except FileNotFoundError:
        raise SettingsError(describe_missing_path(path, kind)) from None
    except OSError as error:
        raise SettingsError(f"{path}: cannot be read: {error.strerror}") from None
    except (tomllib.TOMLDecodeError, UnicodeDecodeError, RecursionError) as error:
        raise SettingsError(f"{path}: not valid TOML: {error}") from None


def read_stored_settings(path: Path) -> dict[str, Any]:
    """Read the settings.toml of a run, with its keys of earlier versions, without a warning."""
    return upgrade_file(read_toml(path), warn=False)


def merge_settings(base: Mapping[str, Any], overrides: Mapping[str, Any]) -> dict[str, Any]:
    """Return ``base`` updated with ``overrides``; nested tables are merged key by key."""
    merged = dict(base)
    for key, value in overrides.items():
        base_value = merged.get(key)
        if isinstance(value, Mapping) and isinstance(base_value, Mapping):
            merged[key] = merge_settings(base_value, value)
        else:
            merged[key] = value
    return merged


def load_user_settings(
    config: Path | str | Mapping[str, Any] | None,
    values: Mapping[str, Any] | None = None,
    assignments: Sequence[str] = (),
) -> dict[str, Any]:
    """Merge the user's settings. Keys of version 0.1 get their current names.

    Args:
        config: A TOML file, or nested settings.
        values: Nested settings, which override ``config``.
        assignments: Settings such as "optim.lr=2e-4", which override ``values``.

    Raises:
        SettingsError: The file is unreadable, or an assignment is invalid.
    """
    if isinstance(config, Path | str):
        config = read_toml(Path(config))
    # Rename before merging, so that the same setting under its old and its new name is one key.
    settings = merge_settings(upgrade_file(config or {}), upgrade_tables(values or {}))
    return merge_settings(settings, upgrade_tables(parse_assignments(assignments)))


def get_table(settings: Mapping[str, Any], name: str) -> dict[str, Any]:
    """Return a copy of a table of nested settings; empty if it is missing or not a table."""
    table = settings.get(name)
    return dict(table) if isinstance(table, Mapping) else {}


def parse_assignments(assignments: Sequence[str]) -> dict[str, Any]:
    """Parse assignments such as "optim.lr=2e-4" into nested tables.

    A value that is not valid TOML is a string. It keeps its spaces, which can be a part of a
    prompt, unless there is one before the equals sign, as in "name = value".

    Raises:
        SettingsError: An assignment is invalid.
    """
    settings: dict[str, Any] = {}
    for assignment in assignments:
        name, equals, text = assignment.partition("=")
        if not equals or not name.strip():
            raise SettingsError(f"--set {assignment!r}: expected KEY=VALUE, such as optim.lr=2e-4")
        try:
            value = tomllib.loads(f"value = {text.strip()}")["value"]
        except (tomllib.TOMLDecodeError, RecursionError):
            value = text.strip() if name.endswith(" ") else text
        nested: Any = value
        for key in reversed(name.strip().split(".")):
            nested = {key: nested}
        settings = merge_settings(settings, nested)
    return settings


def _remove_none(value: Any) -> Any:
    """Return nested tables without the keys whose value is None."""
    if isinstance(value, dict):
        return {key: _remove_none(item) for key, item in value.items() if item is not None}
    return value


def _get_table_class(cls: type[BaseModel], key: str) -> type[BaseModel] | None:
    """Return the settings class of the field ``key``, or None if the field is not a table."""
    field = cls.model_fields.get(key)
    if field is None:
        return None
    types: Sequence[Any] = (field.annotation,)
    if get_origin(field.annotation) is UnionType:
        types = get_args(field.annotation)
    table_classes = [member for member in types if _is_settings_class(member)]
    return table_classes[0] if table_classes else None


def _is_settings_class(annotation: Any) -> bool:
    return isinstance(annotation, type) and issubclass(annotation, BaseModel)


def _list_valid_keys(cls: type[BaseModel], location: Sequence[int | str]) -> list[str]:
    """Return the valid keys of the table that contains ``location``."""
    table: type[BaseModel] | None = cls
    for key in location[:-1]:
        table = None if table is None else _get_table_class(table, str(key))
    return list(table.model_fields) if table else []


def _iter_setting_names(cls: type[BaseModel], prefix: str = "") -> Iterator[str]:
    """Yield the dotted names of all settings, such as "optim.lr"."""
    for key in cls.model_fields:
        table = _get_table_class(cls, key)
        if table is None:
            yield prefix + key
        else:
            yield from _iter_setting_names(table, f"{prefix}{key}.")


def _suggest_name(cls: type[BaseModel], key: str, valid_keys: Sequence[str]) -> str | None:
    """Suggest a valid name for an unknown key; None if no name is similar.

    A setting with exactly this key in another table comes first. Otherwise, the most similar valid
    key is suggested, where a valid key is also compared by its name in version 0.1.
    """
    for name in _iter_setting_names(cls):
        if name.rpartition(".")[2] == key:
            return name
    valid_by_old_key: dict[str, str] = {}
    for names in RENAMED_SETTINGS.values():
        valid_by_old_key |= {old: new for old, new in names.items() if new in valid_keys}
    matches = difflib.get_close_matches(key, [*valid_keys, *valid_by_old_key], n=1)
    return valid_by_old_key.get(matches[0], matches[0]) if matches else None


def _format_validation_error(cls: type[BaseModel], error: ValidationError, source: str) -> str:
    """Return a line for each invalid setting."""
    lines = []
    for detail in error.errors():
        name = ".".join(str(part) for part in detail["loc"])
        if detail["type"] != "extra_forbidden":
            prefix = f"{name}: " if name else ""
            message = detail["msg"].removeprefix("Value error, ")
            # For a check across several settings, the message contains their values.
            is_table = isinstance(detail["input"], Mapping | BaseModel)
            value = "" if is_table else f", found {detail['input']!r}"
            lines.append(f"{source}: {prefix}{message}{value}")
            continue
        valid_keys = _list_valid_keys(cls, detail["loc"])
        suggestion = _suggest_name(cls, str(detail["loc"][-1]), valid_keys)
        hint = f"; did you mean {suggestion!r}?" if suggestion else ""
        lines.append(
            f"{source}: unknown setting {name!r}{hint} (valid settings: {', '.join(valid_keys)})"
        )
    return "\n".join(lines)
