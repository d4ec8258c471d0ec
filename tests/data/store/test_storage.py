"""Files in object stores are read as files on disk are, through fsspec's own store in memory."""

import multiprocessing
import sys

import fsspec
import pytest
from caption_data import content, refusal
from sharded import caption_members, write_tar

from vlm.data.sources.shards import Shards
from vlm.data.store import storage
from vlm.untrusted.tars import Span

URL = "memory://bucket/set"


@pytest.fixture
def store(tmp_path):
    """The same shards on disk and in memory."""
    fs = fsspec.filesystem("memory")
    for name, first in (("train/0.tar", 0), ("train/1.tar", 4), ("val/0.tar", 8)):
        path = write_tar(tmp_path / name, caption_members(4, first=first))
        fs.pipe_file(f"/bucket/set/{name}", path.read_bytes())
    yield fs
    fs.rm("/bucket", recursive=True)


def shards(root, **options):
    return Shards(root=str(root), remote=True, write_index=True, **options)


def test_a_store_reads_as_the_disk_does(store, tmp_path):
    remote, local = shards(URL), shards(tmp_path)
    assert content(remote) == content(local)
    for name in ("train", "val"):
        pairs = zip(remote.split(name).records(), local.split(name).records(), strict=True)
        assert all(ours.image() == theirs.image() for ours, theirs in pairs)
    assert not list(store.glob("/bucket/**/*.index"))  # nothing is written there


def test_an_index_in_a_store_is_used(store, tmp_path, monkeypatch):
    shards(tmp_path)
    for path in tmp_path.glob("*/*.index"):
        store.pipe_file(f"/bucket/set/{path.relative_to(tmp_path).as_posix()}", path.read_bytes())
    monkeypatch.setattr("vlm.data.store.shards.build_index", None)
    assert content(shards(URL)) == content(shards(tmp_path))


def test_patterns_of_urls(store, tmp_path):
    truth = content(shards(tmp_path))
    for pattern in ("train/{0..1}.tar", "train/*.tar", "{train,absent}/[01].tar"):
        source = shards(".", path=f"{URL}/{pattern}", val_path=f"{URL}/val/0.tar")
        assert content(source) == truth
    assert content(shards(f"file://{tmp_path}")) == truth


def _pixels(at):
    return at[0].record(at[1]).image().tobytes()


def test_workers_read_on_their_own(store):
    split = shards(URL).split("train")
    keys = [(split, index) for index in range(8)] * 3
    with multiprocessing.get_context("fork").Pool(2) as pool:
        assert pool.map(_pixels, keys) == [_pixels(key) for key in keys]


def test_a_read_that_fails_for_a_moment_is_tried_again(store, monkeypatch):
    pauses, url = [], f"{URL}/train/0.tar"
    monkeypatch.setattr(storage.time, "sleep", pauses.append)
    real, failures = type(store).cat_file, [RuntimeError("slow down"), RuntimeError("slow down")]
    whole = store.cat_file("/bucket/set/train/0.tar")

    def failing(self, *args, **options):
        if failures:
            raise failures.pop()
        return real(self, *args, **options)

    monkeypatch.setattr(type(store), "cat_file", failing)
    assert storage.read_span(url, Span(100, 50)) == whole[100:150] and pauses == list(storage.PAUSES)
    failures[:] = [RuntimeError(f"{n}\nlines") for n in range(3)]
    with pytest.raises(OSError, match=r"^RuntimeError: 0 lines$"):
        storage.read_span(url, Span(100, 50))


def test_urls_are_not_read_where_they_may_not(store):
    message = refusal(Shards, root=URL)
    assert "data.root=memory://" in message and "VLM_REMOTE=1" in message
    assert "data.val_path=" in refusal(Shards, root=".", path="x.tar", val_path=f"{URL}/val/0.tar")


def test_what_is_missing_is_named(store, monkeypatch):
    assert "absent.tar: cannot be read" in refusal(shards, ".", path=f"{URL}/absent.tar")
    assert "set data.root to the folder of the shards" in refusal(shards, "memory://nowhere")
    assert "is not in a supported store" in refusal(shards, "strange://bucket")
    monkeypatch.setitem(sys.modules, "s3fs", None)  # as if it were not installed
    message = refusal(shards, "s3://bucket/set")
    assert message.startswith("s3://bucket/set") and 'pip install "vlm-lightning[shards]"' in message


def test_braces_are_those_of_a_shell(monkeypatch):
    patterns = {"/x/{008..011}.tar": [f"/x/{n:03d}.tar" for n in range(8, 12)], "/x/{2..0}": ["/x/2", "/x/1", "/x/0"]}
    patterns |= {"/{a,b}/{1..2}": ["/a/1", "/a/2", "/b/1", "/b/2"], "/{a,b{0..1}}": ["/a", "/b0", "/b1"]}
    assert {pattern: storage.expand_pattern(pattern) for pattern in patterns} == patterns
    monkeypatch.setattr(storage, "MAX_EXPANDED", 99)
    with pytest.raises(ValueError, match="more than 99"):
        storage.expand_pattern("/{0..9999999}/{0..9999999}")
