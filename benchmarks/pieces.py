"""Pre-training steps with two pieces of the batch at once on the CPU, against one on all threads.

The two ways take turns in one process, some steps each on the same batches; a ratio is the median
over the turns of how many times as many steps a second two at once are. With ``--busy`` another
process keeps one core at work meanwhile, as a person's browser would.

    python benchmarks/pieces.py --store STORE [--size mini] [--turns 5] [--busy] [--json FILE]
"""

import argparse
import subprocess
import sys
import time
from pathlib import Path
from statistics import median

import torch
from reporting import report

from bertsmith.data.store import Store
from bertsmith.train import pieces
from bertsmith.train.resolve import Wishes, resolve
from bertsmith.train.schedule import Phase
from bertsmith.train.session import Session
from bertsmith.train.step import take_step

STEPS = 5


def seconds(session: Session, most: int, first: int) -> float:
    """Return the median time of a step, the first one not counted."""
    pieces.MOST = most
    work = session.work([Phase(0, first + STEPS + 1, session.settings.data.length)])
    found = []
    session.model.train()
    for step, whole in enumerate(work.pieces(first), first):
        began = time.perf_counter()
        take_step(work.losses, whole, session.model, session.optimizer, session.machine,
                  step=step, seed=0, rate=1e-5, clip=1.0, together=work.together)  # fmt: skip
        found.append(time.perf_counter() - began)
    return median(found[1:])


def main() -> None:
    """Measure both ways in turns."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--store", type=Path, required=True)
    parser.add_argument("--size", default="mini")
    parser.add_argument("--turns", type=int, default=5)
    parser.add_argument("--busy", action="store_true")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    store = Store.open(options.store)
    session = Session(resolve(Wishes(data=options.store, size=options.size), store), store)
    busy = subprocess.Popen([sys.executable, "-c", "while True: pass"]) if options.busy else None
    try:
        turns = [(seconds(session, 1, turn * STEPS), seconds(session, 2, turn * STEPS))
                 for turn in range(options.turns)]  # fmt: skip
    finally:
        if busy is not None:
            busy.kill()
    faster = [alone / both for alone, both in turns]
    ratios = {"two at once / one": median(faster), "least": min(faster), "greatest": max(faster)}
    figures = {
        "seconds a step, one": median(alone for alone, _ in turns),
        "seconds a step, two at once": median(both for _, both in turns),
        "threads": float(torch.get_num_threads()),
    }
    report(
        f"pieces, {options.size}{', busy' if options.busy else ''}", ratios, figures, options.json
    )


if __name__ == "__main__":
    main()
