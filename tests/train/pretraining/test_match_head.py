"""The benchmark that measures the attention between equal tokens of two texts."""

from pathlib import Path

import match_head
import pytest


def test_tokens_that_occur_once_in_each_text_are_found() -> None:
    """Special tokens, repeated tokens and tokens of one text are left out."""
    tokens = ["[CLS]", "a", "b", "b", "c", "[SEP]", "c", "a", "d", "d", "[SEP]"]
    segments = [0] * 6 + [1] * 5
    assert match_head.find_shared_tokens(tokens, segments) == [(1, 7), (4, 6), (7, 1), (6, 4)]


def test_table_has_the_attention_of_the_models(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A match head of mini-en attends to equal tokens more than its first head does."""
    pairs = tmp_path / "pairs.csv"
    pairs.write_text("sentence1,sentence2,score\nthe cat sleeps,a cat eats,2.0\n")
    attention = []
    for head in ("3", "0"):
        arguments = ["match_head.py", "mini-en", "--head", head, "--pairs", str(pairs)]
        monkeypatch.setattr("sys.argv", arguments)
        match_head.main()
        row = capsys.readouterr().out.splitlines()[-1]
        assert row.startswith("| mini-en |")
        attention.append([float(cell) for cell in row.split("|")[2:5]])
    (match_other, match_self, _), (other, _, _) = attention
    assert match_other > 0.2
    assert match_other + match_self > 0.8
    assert other < 0.1
