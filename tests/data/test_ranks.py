"""Ranks by the variables of torchrun and srun, for captions of shards and for training."""

import os

import pytest

from vlm.machine import Rank, rank_by_launcher
from vlm.training.run.processes import find_launched_rank

TORCHRUN = {"TORCHELASTIC_RUN_ID": "1", "RANK": "5", "WORLD_SIZE": "8", "LOCAL_RANK": "1"}
ALLOCATED = {"SLURM_JOB_ID": "7", "SLURM_NTASKS": "4", "SLURM_PROCID": "0", "SLURM_LOCALID": "0"}
SRUN = {**ALLOCATED, "SLURM_STEP_ID": "0", "SLURM_JOB_NAME": "train", "SLURM_PROCID": "3", "SLURM_LOCALID": "1"}
HAND = {"RANK": "1", "WORLD_SIZE": "2"}  # as other launchers set them


@pytest.mark.parametrize(
    ("variables", "ours", "training"),
    [
        ({}, Rank(), None),
        (TORCHRUN, Rank(5, 8, 1), (5, 8)),
        ({**TORCHRUN, "RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0"}, Rank(), None),
        (SRUN, Rank(3, 4, 1), (3, 4)),
        ({**SRUN, **TORCHRUN}, Rank(5, 8, 1), (5, 8)),  # torchrun within srun
        (ALLOCATED, Rank(), None),  # sbatch or salloc, without srun
        ({**SRUN, "SLURM_JOB_NAME": "interactive"}, Rank(), None),  # a shell of salloc
        ({**SRUN, "SLURM_JOB_NAME": "bash"}, Rank(), None),  # srun --pty bash
        (HAND, Rank(1, 2), None),  # Lightning starts its own processes there
        ({**HAND, **SRUN}, Rank(1, 2), (3, 4)),
        ({"RANK": "1", **SRUN}, Rank(3, 4, 1), (3, 4)),  # of how many is not said
    ],
)
def test_the_rank_is_that_of_the_launcher(variables, ours, training, monkeypatch):
    for name in {*os.environ, *variables}:
        if name.startswith(("SLURM", "TORCHELASTIC")) or name in ("RANK", "WORLD_SIZE", "LOCAL_RANK"):
            monkeypatch.delenv(name, raising=False)
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    assert rank_by_launcher() == ours and find_launched_rank() == training
