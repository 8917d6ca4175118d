"""Prints and saves the results of a benchmark."""

import json
import os
import platform
from importlib.metadata import version
from pathlib import Path


def describe_machine() -> dict[str, object]:
    """Return the processor, number of cores, memory and library versions of this machine."""
    cpu_info = Path("/proc/cpuinfo").read_text() if Path("/proc/cpuinfo").exists() else ""
    model_names = [
        line.partition(":")[2].strip() for line in cpu_info.splitlines() if "model name" in line
    ]
    memory_bytes = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    return {
        "processor": model_names[0] if model_names else platform.processor(),
        "cores": len(os.sched_getaffinity(0)),
        "memory_gib": round(memory_bytes / 2**30, 1),
        "python": platform.python_version(),
        **{name: version(name) for name in ("numpy", "tokenizers")},
    }


def report(
    name: str, ratios: dict[str, float], measurements: dict[str, float], path: Path | None
) -> None:
    """Print ratios and measurements, and write them as JSON to ``path`` if it is given."""
    for title, values in (("ratios", ratios), ("measurements", measurements)):
        print(f"{title}:")
        for key, value in values.items():
            print(f"  {key}: {value:,.3f}")
    if path is not None:
        content = {
            "name": name,
            "ratios": ratios,
            "figures": measurements,
            "machine": describe_machine(),
        }
        path.write_text(json.dumps(content, indent=2) + "\n")
        print(f"wrote {path}")
