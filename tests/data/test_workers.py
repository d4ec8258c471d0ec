"""Batches that cannot be handed over by the process that read them."""

import multiprocessing
import resource
import tempfile

import pytest
import torch
from torch.utils.data import DataLoader, Dataset

from vlm.data.samples import return_batch
from vlm.data.workers import end_workers, worker_context
from vlm.errors import UserError
from vlm.training.run.faults import _find_user_error

NUMBERS = 4096


class Large(Dataset):
    """Batches of tensors that lie in shared memory."""

    def __getitems__(self, keys):
        return [torch.zeros(NUMBERS) for _ in keys]

    def __len__(self):
        return 9


def without_room(worker):
    resource.setrlimit(resource.RLIMIT_FSIZE, (NUMBERS, NUMBERS))  # of shared memory too


def batches(workers=1, **options):
    """Those of a loader that gives up: else a test would not end before the fault was mended."""
    own = {"num_workers": workers, "multiprocessing_context": worker_context(), "timeout": 60}
    try:
        return list(DataLoader(Large(), batch_size=4, collate_fn=return_batch, **own, **options))
    finally:
        end_workers()


@pytest.mark.parametrize("workers", [1, 2])
def test_a_batch_that_does_not_fit_into_shared_memory_ends_in_a_line(workers):
    with pytest.raises(UserError) as fault:
        batches(workers, worker_init_fn=without_room)
    said = _find_user_error(fault.value, {})
    assert str(said).startswith("a worker cannot send a batch") and "--shm-size" in str(said)
    assert "\n" not in str(said) and said.status == 1


@pytest.mark.parametrize("length", [8, 120])
def test_batches_come_through_as_they_are_whatever_the_path_of_temporary_files(length, tmp_path, monkeypatch):
    folder = tmp_path / ("t" * length)  # a socket's path may have 107 bytes
    folder.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(folder))
    monkeypatch.setitem(multiprocessing.current_process()._config, "tempdir", None)  # not yet made
    assert [len(batch) for batch in batches()] == [4, 4, 1]
