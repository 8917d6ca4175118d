"""The teacher's outputs on disk: computed once, in chunks, and memory-mapped by the training loop.

RUN/teacher/outputs.npy    float16 or float32 [n, W], the outputs of each text or example
RUN/teacher/state.json     what the outputs belong to, and how many rows are computed
"""

from collections.abc import Callable
from pathlib import Path
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from bertsmith.errors import RunError
from bertsmith.files import parse_json, write_json
from bertsmith.progress import Progress

CACHE_DIR: Final = "teacher"
_OUTPUTS_FILE, _STATE_FILE = "outputs.npy", "state.json"
#: Rows that are computed and written together. After an interruption, at most these are computed
#: again.
_CHUNK_ROWS: Final = 4096


def cache_outputs(
    run: Path,
    num_rows: int,
    width: int,
    fingerprint: str,
    compute_rows: Callable[[int, int], NDArray[np.float32]],
    progress: Progress,
    dtype: type[np.floating[Any]] = np.float16,
) -> NDArray[np.floating[Any]]:
    """Return the teacher's outputs, after computing those that are not in the cache yet.

    Args:
        run: Run directory.
        num_rows: Number of rows, n.
        width: Values per row, W.
        fingerprint: Hash of the teacher and the data. Outputs with another one are replaced.
        compute_rows: Returns the rows from the first index to the second one, float32.
        progress: Receives the size of the cache and progress.
        dtype: The type in which outputs are stored. Vectors and logits need 16 bits; regression
            scores, whose range is that of the labels, need 32.

    Returns:
        [n, W], memory-mapped for reading.

    Raises:
        RunError: If an output is too large for the type, or not finite.
    """
    folder = run / CACHE_DIR
    outputs_file, state_file = folder / _OUTPUTS_FILE, folder / _STATE_FILE
    identity: dict[str, Any] = {"fingerprint": fingerprint, "shape": [num_rows, width]}
    if dtype is np.float32:
        identity["dtype"] = "float32"
    num_bits = 8 * np.dtype(dtype).itemsize
    num_cached = _count_cached_rows(state_file, outputs_file, identity)
    if num_cached < num_rows:
        size = f"{num_bits / 8 * num_rows * width / 1e6:,.1f} MB"
        cached_rows = f", {num_cached:,} of them cached" if num_cached else ""
        progress.log(
            f"outputs of the teacher: {num_rows:,} x {width:,} in {num_bits} bits, {size} in "
            f"{folder}{cached_rows}"
        )
        folder.mkdir(parents=True, exist_ok=True)
        mode: Any = "r+" if num_cached else "w+"
        outputs = np.lib.format.open_memmap(outputs_file, mode, dtype, shape=(num_rows, width))
        progress.start("teacher", num_rows, "rows", num_cached)
        while num_cached < num_rows:
            end = min(num_cached + _CHUNK_ROWS, num_rows)
            rows = compute_rows(num_cached, end)
            if not np.abs(rows).max(initial=0.0) <= np.finfo(dtype).max:
                raise RunError(
                    f"the teacher's outputs for rows {num_cached:,} to {end - 1:,} are not finite "
                    f"numbers of {num_bits} bits; check the teacher with `bertsmith inspect`"
                )
            outputs[num_cached:end] = rows
            outputs.flush()
            write_json(state_file, {**identity, "num_rows": end})
            progress.advance(end - num_cached)
            num_cached = end
        progress.finish()
        del outputs
    return np.load(outputs_file, mmap_mode="r")  # type: ignore[no-any-return]


def _count_cached_rows(state_file: Path, outputs_file: Path, identity: dict[str, Any]) -> int:
    """Return the number of rows in the cache; 0 if it belongs to another teacher or other data."""
    try:
        state = parse_json(state_file.read_bytes())
        shape = list(np.load(outputs_file, mmap_mode="r").shape)
        if {**identity, "num_rows": state["num_rows"]} != state or shape != identity["shape"]:
            return 0
        return int(state["num_rows"])
    except (OSError, ValueError, KeyError, TypeError):
        return 0
