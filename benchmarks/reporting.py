"""What every benchmark ends with: its figures for people, and as JSON for machines.

It never knows what was measured.
"""

import json
import os
import platform
from importlib.metadata import version
from pathlib import Path


def machine() -> dict[str, object]:
    """Return what the figures depend on: processor, cores, memory, versions."""
    info = Path("/proc/cpuinfo").read_text() if Path("/proc/cpuinfo").exists() else ""
    names = [line.partition(":")[2].strip() for line in info.splitlines() if "model name" in line]
    pages = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    return {
        "processor": names[0] if names else platform.processor(),
        "cores": len(os.sched_getaffinity(0)),
        "memory_gib": round(pages / 2**30, 1),
        "python": platform.python_version(),
        **{name: version(name) for name in ("numpy", "tokenizers")},
    }


def report(
    name: str, ratios: dict[str, float], figures: dict[str, float], path: Path | None
) -> None:
    """Print ratios and figures, and write them to ``path`` if one is given."""
    for title, values in (("ratios", ratios), ("figures", figures)):
        print(f"{title}:")
        for key, value in values.items():
            print(f"  {key}: {value:,.3f}")
    if path is not None:
        content = {"name": name, "ratios": ratios, "figures": figures, "machine": machine()}
        path.write_text(json.dumps(content, indent=2) + "\n")
        print(f"wrote {path}")
