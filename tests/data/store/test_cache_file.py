"""Locks of the cache."""

import errno
import fcntl
import threading
import time

import pytest

from vlm.data.store.cache_file import file_lock
from vlm.errors import UserError


def test_one_thread_at_a_time_passes(tmp_path):
    inside, most = [], []

    def enter():
        with file_lock(tmp_path / "new" / "file"):
            inside.append(1)
            most.append(len(inside))
            time.sleep(0.05)
            inside.pop()

    threads = [threading.Thread(target=enter) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert most == [1, 1, 1, 1]


@pytest.mark.parametrize("code", [errno.ENOSYS, errno.ENOLCK])
def test_all_pass_where_the_file_system_has_no_locks(code, tmp_path, monkeypatch):
    def refuse(*args):
        raise OSError(code, "no locks here")

    monkeypatch.setattr(fcntl, "flock", refuse)
    with file_lock(tmp_path / "file"), file_lock(tmp_path / "file"):
        pass


def test_a_folder_that_cannot_be_made_is_named(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(UserError, match="cannot be written"), file_lock(tmp_path / "file" / "below"):
        pass
