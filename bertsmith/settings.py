"""Strict, typed, frozen settings and their way to and from TOML.

It never knows which settings there are: each owner declares its own class beside itself.
"""

import difflib
import tomllib
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from types import UnionType
from typing import Any, ClassVar, Self, get_args, get_origin

import tomli_w
from pydantic import BaseModel, ConfigDict, ValidationError, model_validator

from bertsmith.compatibility import upgrade_settings
from bertsmith.errors import SettingsError


class Settings(BaseModel):
    """The base of every settings class: frozen, keyword-only, strict; unknown keys are errors."""

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True)

    @classmethod
    def parse(cls, values: Mapping[str, Any], source: str) -> Self:
        """Validate ``values``; on a fault raise SettingsError naming the key and ``source``.

        An unknown key names the nearest valid one.
        """
        try:
            return cls.model_validate(dict(values))
        except ValidationError as error:
            raise SettingsError(_explain(cls, error, source)) from None

    def to_toml(self) -> str:
        """Return the settings as TOML; a key whose value is None is left out."""
        return tomli_w.dumps(_without_none(self.model_dump(mode="json")))


class SettingsTable(Settings):
    """Settings that are a named table of a settings file; keys of version 0.1 are accepted."""

    #: The name of the table, such as ``optim``.
    table: ClassVar[str]

    @model_validator(mode="before")
    @classmethod
    def _upgrade(cls, values: Any) -> Any:
        return upgrade_settings(values, cls.table) if isinstance(values, dict) else values


def read_toml(path: Path) -> dict[str, Any]:
    """Read a TOML file into nested dictionaries; a fault names the file and the line."""
    try:
        with path.open("rb") as file:
            return tomllib.load(file)
    except FileNotFoundError:
        raise SettingsError(f"{path}: no such settings file") from None
    except OSError as error:
        raise SettingsError(f"{path}: cannot be read: {error.strerror}") from None
    except (tomllib.TOMLDecodeError, UnicodeDecodeError, RecursionError) as error:
        raise SettingsError(f"{path}: not valid TOML: {error}") from None


def merge_settings(base: Mapping[str, Any], over: Mapping[str, Any]) -> dict[str, Any]:
    """Return ``base`` with the keys of ``over`` laid on top, tables merged key by key."""
    result = dict(base)
    for key, value in over.items():
        old = result.get(key)
        both = isinstance(value, Mapping) and isinstance(old, Mapping)
        result[key] = merge_settings(old, value) if both else value  # type: ignore[arg-type]
    return result


def user_settings(
    config: Path | None,
    values: Mapping[str, Any] | None = None,
    assignments: Sequence[str] = (),
) -> dict[str, Any]:
    """Return all that a user said: the file's settings, ``values`` over them, assignments on top.

    Raises SettingsError for a file that cannot be read, or an assignment that is none.
    """
    said = merge_settings(read_toml(config) if config else {}, values or {})
    tables = merge_settings(said, parse_assignments(assignments))
    # Before defaults are merged in under the current names.
    return {
        name: upgrade_settings(table, name) if isinstance(table, Mapping) else table
        for name, table in tables.items()
    }


def parse_assignments(assignments: Sequence[str]) -> dict[str, Any]:
    """Turn ``["optim.lr=2e-4", ...]`` into nested dictionaries; a value is TOML or plain text."""
    result: dict[str, Any] = {}
    for assignment in assignments:
        path, equals, text = assignment.partition("=")
        if not equals or not path.strip():
            raise SettingsError(f"--set {assignment!r}: expected KEY=VALUE, such as optim.lr=2e-4")
        try:
            value = tomllib.loads(f"value = {text.strip()}")["value"]
        except (tomllib.TOMLDecodeError, RecursionError):
            value = text.strip()
        nested: Any = value
        for key in reversed(path.strip().split(".")):
            nested = {key: nested}
        result = merge_settings(result, nested)
    return result


def _without_none(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _without_none(item) for key, item in value.items() if item is not None}
    return value


def _table_at(cls: type[BaseModel], key: str) -> type[BaseModel] | None:
    """Return the table that stands under ``key``, None where there is none."""
    field = cls.model_fields.get(key)
    if field is None:
        return None
    options: Sequence[Any] = (field.annotation,)
    if get_origin(field.annotation) is UnionType:
        options = get_args(field.annotation)
    tables = [item for item in options if isinstance(item, type) and issubclass(item, BaseModel)]
    return tables[0] if tables else None


def _fields_at(cls: type[BaseModel], location: Sequence[int | str]) -> list[str]:
    """Return the valid keys of the table in which ``location`` stands."""
    current: type[BaseModel] | None = cls
    for key in location[:-1]:
        current = current and _table_at(current, str(key))
    return list(current.model_fields) if current else []


def _names(cls: type[BaseModel], prefix: str = "") -> Iterator[str]:
    """Yield the dotted names of all settings."""
    for key in cls.model_fields:
        table = _table_at(cls, key)
        if table is None:
            yield prefix + key
        else:
            yield from _names(table, f"{prefix}{key}.")


def _nearest(cls: type[BaseModel], key: str, valid: Sequence[str]) -> str | None:
    """Return what an unknown key may have been meant to be: here, or the same in another table."""
    elsewhere = [name for name in _names(cls) if name.rpartition(".")[2] == key]
    near = elsewhere or difflib.get_close_matches(key, valid, n=1)
    return near[0] if near else None


def _explain(cls: type[BaseModel], error: ValidationError, source: str) -> str:
    lines = []
    for fault in error.errors():
        name = ".".join(str(part) for part in fault["loc"])
        if fault["type"] != "extra_forbidden":
            prefix, told = f"{name}: " if name else "", fault["msg"].removeprefix("Value error, ")
            # What is wrong between several settings is said with their values.
            whole = isinstance(fault["input"], Mapping | BaseModel)
            found = "" if whole else f", found {fault['input']!r}"
            lines.append(f"{source}: {prefix}{told}{found}")
            continue
        valid = _fields_at(cls, fault["loc"])
        near = _nearest(cls, str(fault["loc"][-1]), valid)
        hint = f"; did you mean {near!r}?" if near else ""
        lines.append(f"{source}: unknown setting {name!r}{hint} (known here: {', '.join(valid)})")
    return "\n".join(lines)
