"""Memory that a growing training has freed goes back to the system."""

import os
import subprocess
import sys
from types import SimpleNamespace

import pytest
import torch

from vlm.training.callbacks import freed_memory

PROGRAM = """
import os
from vlm.tuning import keep_freed_memory, return_freed_memory
from vlm.machine import held_memory
keep_freed_memory()
blocks = [bytearray(1 << 20) for _ in range(300)]
pinned, blocks = blocks[::50], None  # holes between what stays
full = held_memory()
return_freed_memory()
print(full >> 20, held_memory() >> 20)
"""


@pytest.mark.skipif(not os.path.exists("/proc/self/statm"), reason="needs Linux")
def test_holes_are_returned_to_the_system() -> None:
    done = subprocess.run([sys.executable, "-c", PROGRAM], capture_output=True, text=True, check=True)
    full, rest = map(int, done.stdout.split())
    assert full > 300 and rest < full - 250


def test_only_a_process_that_has_grown_returns_memory(monkeypatch) -> None:
    sizes = dict(zip(range(50, 400, 50), (100, 124, 126, 90, 112, 113, 80), strict=True))  # by step
    step, returned = SimpleNamespace(global_step=0), []
    monkeypatch.setattr(freed_memory, "held_memory", lambda: sizes[step.global_step])
    monkeypatch.setattr(freed_memory, "return_freed_memory", lambda: returned.append(step.global_step))
    callback = freed_memory.ReturnFreedMemory()
    for step.global_step in range(1, 351):
        callback.on_train_batch_end(step, SimpleNamespace(device=torch.device("cpu")), None, None, 0)  # type: ignore[arg-type]
    assert returned == [150, 300]
