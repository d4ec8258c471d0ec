"""A file that is written whole or not at all, beside readers that open it at any moment."""

import os
import threading

import pytest

from vlm.io.files import atomic_write


def write(path, content: bytes, **options) -> None:
    with atomic_write(path, sync=False, **options) as file:
        file.write(content)


def test_a_reader_finds_the_path_while_the_old_file_is_kept(tmp_path):
    path, keep, contents = tmp_path / "last", tmp_path / "previous", [bytes([i]) * 1000 for i in range(200)]
    write(path, contents[0])
    seen, done = [], threading.Event()

    def read() -> None:
        while not done.is_set():
            seen.append(path.read_bytes() if path.is_file() else None)

    reader = threading.Thread(target=read)
    reader.start()
    for content in contents[1:]:
        write(path, content, keep=keep)
    done.set()
    reader.join()
    assert len(seen) > 1 and set(seen) <= set(contents)
    assert (path.read_bytes(), keep.read_bytes()) == (contents[-1], contents[-2])
    assert sorted(os.listdir(tmp_path)) == ["last", "previous"]


@pytest.mark.parametrize("links", [True, False])
def test_a_save_after_a_kill_between_its_renames_keeps_the_last_whole_file(tmp_path, monkeypatch, links):
    if not links:
        monkeypatch.setattr(os, "link", refuse)
    path, keep = tmp_path / "last", tmp_path / "previous"
    write(path, b"first")
    if links:
        os.link(path, keep)  # a kill came after the old file had its second name
    write(path, b"second", keep=keep)
    assert (path.read_bytes(), keep.read_bytes()) == (b"second", b"first")
    write(path, b"third", keep=keep)
    assert (path.read_bytes(), keep.read_bytes()) == (b"third", b"second")
    assert sorted(os.listdir(tmp_path)) == ["last", "previous"]


def refuse(*args) -> None:
    raise PermissionError("no hard links here")
