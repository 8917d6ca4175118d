"""Options for the labels and answers of fine-tuned models."""

import pytest

from bertsmith.cli.task_options import parse_columns
from bertsmith.errors import SettingsError


def test_columns_are_separated_by_commas() -> None:
    """Spaces around names are ignored; without the option, the result is None."""
    assert parse_columns("--endings", None) is None
    assert parse_columns("--endings", "a, b b ,c") == ["a", "b b", "c"]


@pytest.mark.parametrize("value", ["", "a,", ",a", "a,,b", " "])
def test_empty_column_name_is_an_error(value: str) -> None:
    """The error names the option."""
    with pytest.raises(SettingsError, match=r"--endings '.*': a column name is empty; give names"):
        parse_columns("--endings", value)
