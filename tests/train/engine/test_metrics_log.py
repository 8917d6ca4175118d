"""The metrics log: writing, reading, resumed runs, and incomplete lines."""

import json
import math
from pathlib import Path

import pytest

from bertsmith.errors import RunError
from bertsmith.train.engine.metrics_log import METRICS_FILE, MetricsLog, read_metrics

#: A complete line of the log, without the step.
LINE = b'{"step": %d, "kind": "train"}\n'


def _logged_steps(run: Path) -> list[int]:
    return [line["step"] for line in read_metrics(run)]


def test_lines_are_readable_before_the_log_is_closed(tmp_path: Path) -> None:
    """Lines are read back in order, even while the log is open."""
    log = MetricsLog(tmp_path, 0)
    for step in (1, 2, 3):
        log.write({"step": step, "kind": "train", "loss": step / 3})
    expected = [{"step": step, "kind": "train", "loss": step / 3} for step in (1, 2, 3)]
    assert read_metrics(tmp_path) == expected
    log.sync()
    log.close()


def test_nan_is_null_on_disk(tmp_path: Path) -> None:
    """NaN is written as null, so that each line is valid JSON, and is read as NaN."""
    log = MetricsLog(tmp_path, 0)
    log.write({"step": 1, "kind": "heldout", "pearson": math.nan})
    log.close()
    expected = '{"step": 1, "kind": "heldout", "pearson": null}\n'
    assert (tmp_path / METRICS_FILE).read_text() == expected
    MetricsLog(tmp_path, 1).close()
    (line,) = read_metrics(tmp_path)
    assert line["step"] == 1
    assert math.isnan(line["pearson"])


def test_resumed_run_truncates_the_log_to_its_checkpoint(tmp_path: Path) -> None:
    """A resumed run removes the lines after its checkpoint, so that it logs each step once."""
    log = MetricsLog(tmp_path, 0)
    for step in range(1, 8):
        log.write({"step": step, "kind": "train"})
    log.close()
    resumed_log = MetricsLog(tmp_path, 4)
    assert _logged_steps(tmp_path) == [1, 2, 3, 4]
    resumed_log.write({"step": 5, "kind": "train"})
    resumed_log.close()
    assert _logged_steps(tmp_path) == [1, 2, 3, 4, 5]
    MetricsLog(tmp_path, 0).close()
    assert _logged_steps(tmp_path) == []


@pytest.mark.parametrize(
    "line", [b"\xff", b"{", b"[1]", b"{}", b'{"step": null, "kind": "train"}', b'{"step": 2}', b"3"]
)
def test_damaged_line_is_an_error(tmp_path: Path, line: bytes) -> None:
    """A damaged line before the last one is reported with its number."""
    (tmp_path / METRICS_FILE).write_bytes(LINE % 1 + line + b"\n" + LINE % 3)
    with pytest.raises(RunError, match=r"metrics\.jsonl, line 2: this line is damaged; remove it"):
        read_metrics(tmp_path)


@pytest.mark.parametrize("last_line", ['{"step": 3, "lo', "{", '{"step": 3}{"st', "\0\0\0"])
def test_incomplete_last_line_is_dropped(tmp_path: Path, last_line: str) -> None:
    """The incomplete last line of a killed process is not read, and opening the log removes it."""
    complete_lines = (LINE % 1 + LINE % 2).decode()
    (tmp_path / METRICS_FILE).write_text(complete_lines + last_line)
    assert _logged_steps(tmp_path) == [1, 2]
    log = MetricsLog(tmp_path, 5)
    log.write({"step": 3, "kind": "train"})
    log.close()
    lines = (tmp_path / METRICS_FILE).read_text().splitlines()
    assert [json.loads(line)["step"] for line in lines] == [1, 2, 3]


def test_missing_log_has_no_lines(tmp_path: Path) -> None:
    """A run without a metrics log has no lines."""
    assert read_metrics(tmp_path) == []
