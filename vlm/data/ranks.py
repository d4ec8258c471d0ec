"""The ranks of processes that torchrun or SLURM's srun started, by the variables that these set."""

import os
from dataclasses import dataclass

TORCHELASTIC = "TORCHELASTIC_RUN_ID"  # set by torchrun alone, and what Lightning knows it by
TORCHRUN = ("RANK", "WORLD_SIZE", "LOCAL_RANK")
SRUN = ("SLURM_PROCID", "SLURM_NTASKS", "SLURM_LOCALID")
INTERACTIVE = ("bash", "interactive")  # names of SLURM's jobs that are a shell, as Lightning has them


@dataclass(frozen=True)
class Rank:
    """A process among those of one command.

    Args:
        rank: Its place among all.
        world: Number of all.
        local: Its place among those of its machine.
    """

    rank: int = 0
    world: int = 1
    local: int = 0


def rank_by_launcher(sign: str = "RANK") -> Rank:
    """The rank of this process, which is alone where nothing started several.

    A job of SLURM that starts a process without srun has SLURM_NTASKS too, but one process.

    Args:
        sign: The variable without which torchrun's do not count; other launchers set RANK and WORLD_SIZE too.
    """
    srun = "SLURM_STEP_ID" in os.environ and os.environ.get("SLURM_JOB_NAME") not in INTERACTIVE
    for names, holds in ((TORCHRUN, sign in os.environ), (SRUN, srun)):
        if holds and {*names[:2]} <= os.environ.keys():
            return Rank(*(int(os.environ.get(name, 0)) for name in names))
    return Rank()
