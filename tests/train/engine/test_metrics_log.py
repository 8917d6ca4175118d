"""The journal: what a resume cuts off, and what a kill may leave."""

import json
import math
from pathlib import Path

import pytest

from bertsmith.train.engine.metrics_log import METRICS_FILE, MetricsLog, read_metrics


def _steps(run: Path) -> list[int]:
    return [line["step"] for line in read_metrics(run)]


def test_lines_are_read_back_in_order(tmp_path: Path) -> None:
    """What is written is read back, line by line, before the file is closed too."""
    journal = MetricsLog(tmp_path, 0)
    for step in (1, 2, 3):
        journal.write({"step": step, "kind": "train", "loss": step / 3})
    assert read_metrics(tmp_path) == [
        {"step": s, "kind": "train", "loss": s / 3} for s in (1, 2, 3)
    ]
    journal.sync()
    journal.close()


def test_what_is_no_number_is_null_on_disk(tmp_path: Path) -> None:
    """JSON knows no NaN: every line can be read by any reader, and is NaN again when read here."""
    journal = MetricsLog(tmp_path, 0)
    journal.write({"step": 1, "pearson": math.nan})
    journal.close()
    assert (tmp_path / METRICS_FILE).read_text() == '{"step": 1, "pearson": null}\n'
    MetricsLog(tmp_path, 1).close()
    (line,) = read_metrics(tmp_path)
    assert (line["step"], math.isnan(line["pearson"])) == (1, True)


def test_a_resume_cuts_what_came_after_its_checkpoint(tmp_path: Path) -> None:
    """Lines up to the checkpoint stay, the others go, and new ones follow: none twice."""
    first = MetricsLog(tmp_path, 0)
    for step in range(1, 8):
        first.write({"step": step})
    first.close()
    second = MetricsLog(tmp_path, 4)
    assert _steps(tmp_path) == [1, 2, 3, 4]
    second.write({"step": 5})
    second.close()
    assert _steps(tmp_path) == [1, 2, 3, 4, 5]
    MetricsLog(tmp_path, 0).close()
    assert _steps(tmp_path) == []


@pytest.mark.parametrize("torn", ['{"step": 3, "lo', "{", '{"step": 3}{"st', "\0\0\0"])
def test_a_torn_last_line_is_dropped(tmp_path: Path, torn: str) -> None:
    """A line that a kill left half written is neither read nor kept, nor glued to the next one."""
    whole = '{"step": 1}\n{"step": 2}\n'
    (tmp_path / METRICS_FILE).write_text(whole + torn)
    assert _steps(tmp_path) == [1, 2]
    journal = MetricsLog(tmp_path, 5)
    journal.write({"step": 3})
    journal.close()
    lines = (tmp_path / METRICS_FILE).read_text().splitlines()
    assert [json.loads(line)["step"] for line in lines] == [1, 2, 3]


def test_no_journal_has_no_lines(tmp_path: Path) -> None:
    """A run that has not begun has an empty journal."""
    assert read_metrics(tmp_path) == []
