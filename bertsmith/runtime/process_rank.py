"""The rank of this process among those that torchrun has started; does not import torch."""

import os
from collections.abc import Mapping
from dataclasses import dataclass


@dataclass(frozen=True)
class ProcessRank:
    """The position of a process among those of a run.

    Attributes:
        rank: Number of this process, from 0.
        world_size: Number of processes on all machines.
        local_rank: Number of this process on its machine, from 0.
        local_world_size: Number of processes on this machine.
    """

    rank: int = 0
    world_size: int = 1
    local_rank: int = 0
    local_world_size: int = 1


def read_process_rank(environment: Mapping[str, str] = os.environ) -> ProcessRank:
    """Return the rank that a launcher has set in the environment variables.

    torchrun and PyTorchJob set RANK and WORLD_SIZE; torchrun also sets LOCAL_RANK and
    LOCAL_WORLD_SIZE. Without them, or with a single process, the result is rank 0 of 1.
    """
    if "RANK" not in environment or environment.get("WORLD_SIZE", "1") == "1":
        return ProcessRank()
    return ProcessRank(
        rank=int(environment["RANK"]),
        world_size=int(environment["WORLD_SIZE"]),
        local_rank=int(environment.get("LOCAL_RANK", "0")),
        local_world_size=int(environment.get("LOCAL_WORLD_SIZE", "1")),
    )
