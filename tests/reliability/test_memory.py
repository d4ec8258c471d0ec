"""Too little memory ends a run with what to change."""

import time
from pathlib import Path

import pytest
import torch
from fork_server import ForkServer
from journey import only_run
from small import command

from vlm.checkpoint import load as ckpt
from vlm.errors import UserError
from vlm.training.run.faults import _find_user_error

CONFIG = {"data": {"batch_size": 32}, "trainer": {"accumulate_grad_batches": 2}}


@pytest.mark.slow
def test_a_host_out_of_memory(forks: ForkServer, tmp_path: Path) -> None:
    start = time.monotonic()
    args = command("classification", "trainer.max_epochs=2")
    ended = forks.run(args, cwd=tmp_path, patch="import training_faults; training_faults.strike('no memory', step=5)")
    assert ended.status == 1 and time.monotonic() - start < 60
    assert "error: out of memory" in ended.output and "Traceback" not in ended.output, ended.output
    assert "data.batch_size=4 trainer.accumulate_grad_batches=2" in ended.output
    folder = only_run(tmp_path / "runs")
    assert f"resume=runs/classification/{folder.name}" in ended.output
    assert ckpt.read(folder / "checkpoints" / "last.ckpt")["global_step"] == 4


@pytest.mark.parametrize(
    "fault",
    [
        MemoryError(),
        torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB. GPU 0 has a total capacity of 8 GiB"),
        RuntimeError("[enforce fail at alloc_cpu.cpp:127] err == 0. DefaultCPUAllocator: can't allocate memory"),
        OSError(12, "Cannot allocate memory"),
    ],
    ids=["Python", "CUDA", "torch", "system"],
)
def test_every_kind_names_what_to_change(fault: Exception) -> None:
    found = _find_user_error(fault, CONFIG)
    assert isinstance(found, UserError) and found.status == 1
    assert "data.batch_size=16 trainer.accumulate_grad_batches=4" in str(found) and len(str(found).splitlines()) == 1


@pytest.mark.gpu
def test_a_gpu_out_of_memory() -> None:
    with pytest.raises(torch.OutOfMemoryError) as raised:
        torch.empty(2**45, device="cuda")
    assert "the GPU is out of memory" in str(_find_user_error(raised.value, CONFIG))


def test_other_faults_keep_their_traceback() -> None:
    assert _find_user_error(RuntimeError("mat1 and mat2 shapes cannot be multiplied"), CONFIG) is None
    assert _find_user_error(FileNotFoundError(2, "No such file or directory"), CONFIG) is None
