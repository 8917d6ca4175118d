"""The total of the progress bar of ``prepare``."""

import pytest

from bertsmith.data.prepare import _estimate_bytes
from bertsmith.text.sources import Source


@pytest.mark.parametrize("suffix", [".gz", ".xz", ".bz2", ".zst", ".zstd", ".parquet", ".XZ"])
def test_progress_has_no_total_for_compressed_files(suffix: str) -> None:
    """The bytes of text are known for plain files only."""
    plain = Source("a.txt", 30, "plain")
    assert _estimate_bytes([plain, plain]) == 60
    assert _estimate_bytes([plain, Source(f"a.txt{suffix}", 30, "plain")]) is None
