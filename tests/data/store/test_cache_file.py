"""Locks of the cache; tests/data/text/test_token_file.py has what they are for."""

import errno
import fcntl

import pytest

from vlm.data.store.cache_file import file_lock


@pytest.mark.parametrize("code", [errno.ENOSYS, errno.ENOLCK])
def test_all_pass_where_the_file_system_has_no_locks(code, tmp_path, monkeypatch):
    def refuse(*args):
        raise OSError(code, "no locks here")

    monkeypatch.setattr(fcntl, "flock", refuse)
    with file_lock(tmp_path / "file"), file_lock(tmp_path / "file"):
        pass
