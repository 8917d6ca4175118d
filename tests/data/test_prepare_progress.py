"""The progress bar of ``prepare``."""

from pathlib import Path

import pytest

from bertsmith.data.prepare import _estimate_bytes, prepare
from bertsmith.progress import NullProgress
from bertsmith.text.corpus import find_sources
from bertsmith.text.sources import Source
from tests.data.synthetic_corpus import TOKENIZER


@pytest.mark.parametrize("suffix", [".gz", ".xz", ".bz2", ".zst", ".zstd", ".parquet", ".XZ"])
def test_progress_has_no_total_for_compressed_files(suffix: str) -> None:
    """The bytes of text are known for plain files only."""
    plain = Source("a.txt", 30, "plain")
    assert _estimate_bytes([plain, plain]) == 60
    assert _estimate_bytes([plain, Source(f"a.txt{suffix}", 30, "plain")]) is None


def test_progress_of_korean_text_reaches_the_total(tmp_path: Path) -> None:
    """The total and the progress are bytes, of which a Hangul syllable has three."""
    totals: list[float | None] = []
    amounts: list[float] = []

    class RecordingProgress(NullProgress):
        is_tokenizing = False

        def start(
            self, description: str, total: float | None, unit: str, initial: float = 0
        ) -> None:
            self.is_tokenizing = description == "Tokenizing"
            if self.is_tokenizing:
                assert unit == "bytes"
                totals.append(total)

        def advance(self, amount: float, **fields: str) -> None:
            if self.is_tokenizing:
                amounts.append(amount)

    file = tmp_path / "korean.txt"
    file.write_text("나룻배는 아침에 강을 건넜다. " * 50)
    sources = find_sources([str(file)])
    prepare(sources, TOKENIZER, tmp_path / "store", None, RecordingProgress(), workers=1)
    assert totals == [file.stat().st_size]
    # The space at the end of the file is not part of the document.
    assert sum(amounts) == file.stat().st_size - 1
