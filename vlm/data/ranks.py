"""Ranks of processes started by torchrun or SLURM's srun, from environment variables."""

import os
from dataclasses import dataclass

TORCHELASTIC = "TORCHELASTIC_RUN_ID"  # set by torchrun only; Lightning detects it by this
TORCHRUN = ("RANK", "WORLD_SIZE", "LOCAL_RANK")
SRUN = ("SLURM_PROCID", "SLURM_NTASKS", "SLURM_LOCALID")
INTERACTIVE = ("bash", "interactive")  # names of interactive SLURM jobs, as in Lightning


@dataclass(frozen=True)
class Rank:
    """The rank of a process.

    Args:
        rank: Global rank.
        world: Number of processes.
        local: Rank on its machine.
    """

    rank: int = 0
    world: int = 1
    local: int = 0


def rank_by_launcher(sign: str = "RANK") -> Rank:
    """The rank of this process; a single process if nothing launched several.

    A SLURM job that starts a process without srun has SLURM_NTASKS too, but only one process.

    Args:
        sign: Variable that must be set for torchrun's to count, because other launchers also set RANK and WORLD_SIZE.
    """
    srun = "SLURM_STEP_ID" in os.environ and os.environ.get("SLURM_JOB_NAME") not in INTERACTIVE
    for names, holds in ((TORCHRUN, sign in os.environ), (SRUN, srun)):
        if holds and {*names[:2]} <= os.environ.keys():
            return Rank(*(int(os.environ.get(name, 0)) for name in names))
    return Rank()
