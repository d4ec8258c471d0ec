"""Shards that commands write are read as files are, few of them on disk at a time."""

import multiprocessing
import os
import re
import time

import numpy as np
import pytest
from captioned import refusal
from classed import png
from sharded import captioned, content, write_tar
from vlm.data.sources.caption_shards import CaptionShards
from vlm.data.sources.class_shards import ClassShards
from vlm.data.store.shard_window import Foretold, Near, near_of

from vlm.data.images.image import ImageError
from vlm.data.order import EvalBatches, TrainBatches
from vlm.data.sources.caption_source import lenient

EACH = 6  # samples of a shard


@pytest.fixture
def tars(tmp_path):
    """Nine shards in two splits, and a log of every command that was run."""
    for number in range(9):
        folder = "val" if number == 8 else "train"
        write_tar(tmp_path / "set" / folder / f"{number}.tar", captioned(EACH, first=EACH * number))
    return tmp_path


def command(tars, pattern, then="cat $f"):
    return f"pipe:f={tars}/set/{pattern}.tar; echo $f >> {tars}/log; {then}"


def piped(tars, **options):
    given = {"path": command(tars, "train/{0..7}"), "val_path": command(tars, "val/8")}
    given |= {"root": str(tars), "commands": True, "cached_shards": 4, "cache": str(tars / "cache")}
    return CaptionShards(**given | options)


def files(tars):
    return CaptionShards(root=str(tars / "set"))


def runs(tars):
    return (tars / "log").read_text().split() if (tars / "log").exists() else []


def forget(tars):
    """Removes what was fetched, save for the indexes."""
    (tars / "log").unlink()
    for path in (tars / "cache" / "shards").glob("*.tar"):
        path.unlink()


def kept(tars):
    return len(list((tars / "cache" / "shards").glob("*.tar")))


def test_commands_give_what_files_do(tars):
    ours, theirs = piped(tars), files(tars)
    names = {name: {key.partition(".tar; ")[0] for key in found} for name, found in content(ours).items()}
    assert [sorted(found.values()) for found in content(ours).values()] == [
        sorted(found.values()) for found in content(theirs).values()
    ]
    assert len(set().union(*names.values())) == 9
    for name in ("train", "val"):
        one, other = ours.split(name), theirs.split(name)
        assert all(one.image(0, i) == other.image(0, i) for i in range(len(other)))
        assert all(one.references(i) == other.references(i) for i in range(len(other)))


def test_the_first_start_reads_each_once_and_the_next_none(tars):
    first = content(piped(tars))
    assert sorted(runs(tars)) == sorted(set(runs(tars))) and len(runs(tars)) == 9 and kept(tars) <= 4
    assert content(piped(tars)) == first and len(runs(tars)) == 9


@pytest.mark.parametrize("lengths", [None, lambda epoch: [index * 7 % 5 for index in range(8 * EACH)]])
def test_an_epoch_has_few_on_disk_and_runs_each_about_once(tars, lengths):
    split = piped(tars).split("train")
    forget(tars)
    near = near_of(split)
    options = {"size": len(split), "batch_size": 4, "seed": 3, "position": lambda: (0, 0), "bucket": 2}
    seen, most = [], 0
    for batch in TrainBatches(**options, near=near, lengths=lengths):
        for epoch, index in batch:
            split.image(epoch, index)
            seen.append(index)
            most = max(most, kept(tars))
    assert sorted(seen) == list(range(8 * EACH)) and most == 4
    assert len(set(runs(tars))) == 8 and len(runs(tars)) <= 8 + near.window


def test_the_order_needs_few_shards_at_a_time():
    shards = np.repeat(np.arange(40), np.arange(40) % 7 + 20)
    near = Near(shards, window=5, fetch=print)
    order = near.order(np.random.default_rng(0))
    assert sorted(order) == list(range(len(shards)))
    span = len(shards) // 40  # in as many samples as a shard has, no more than are open at once and one that comes
    alive = [len(set(shards[order[at : at + span]])) for at in range(len(order) - span)]
    assert max(alive) <= 5 + 2 and np.median(alive) >= 5
    other = near.order(np.random.default_rng(1))
    assert (order != other).mean() > 0.9
    kept = near.part(range(100)).order(np.random.default_rng(0))
    assert sorted(kept) == list(range(100))


def test_a_window_over_all_shards_leaves_nothing_of_their_order():
    near = Near(np.repeat(np.arange(4), 500), window=9, fetch=print)
    order = near.order(np.random.default_rng(0))
    for quarter in order.reshape(4, 500):
        assert (np.bincount(near.shards[quarter], minlength=4) > 90).all()  # 125 each are expected


@pytest.mark.parametrize("copies", [1, 3])
def test_shards_are_asked_for_before_their_batches_come(copies):
    events = []
    near = Near(np.repeat(np.arange(4), 10), window=2, fetch=lambda shard: events.append(("fetch", shard)))
    batches = EvalBatches(size=40 * copies, batch_size=5 * copies)
    told = Foretold(batches, near, copies)
    for batch in told:
        events.append(("batch", batch))
    assert [batch for kind, batch in events if kind == "batch"] == list(batches) and len(told) == 8
    for number, batch in enumerate(batches):
        asked = events[: events.index(("batch", batch))]
        ahead = list(batches)[min(number + 2, 7)]  # as many as one shard is good for
        assert ("fetch", ahead[0][1] // copies // 10) in asked


def test_what_is_asked_for_comes_in_the_background(tars):
    split = piped(tars).split("train")
    forget(tars)
    near_of(split).ahead(range(3 * EACH))  # of three shards
    until = time.monotonic() + 10
    while kept(tars) < 3 and time.monotonic() < until:
        time.sleep(0.01)
    for index in range(3 * EACH):
        split.image(0, index)
    assert len(runs(tars)) == 3


def _read(at):
    return at[0].image(0, at[1]).tobytes()


def test_processes_that_want_the_same_tar_wait_for_one(tars):
    split = piped(tars, path=command(tars, "train/{0..7}", "sleep 0.1; cat $f")).split("train")
    forget(tars)
    with multiprocessing.get_context("fork").Pool(4) as pool:
        assert len(pool.map(_read, [(split, index) for index in range(EACH)], chunksize=1)) == EACH
    assert len(runs(tars)) == 1


class TestFailing:
    @pytest.fixture(autouse=True)
    def impatient(self, monkeypatch):
        monkeypatch.setattr("vlm.data.store.pipes.PAUSES", (0.0, 0.0))

    def test_a_command_that_fails_at_the_start_is_named_with_its_last_words(self, tars):
        message = refusal(piped, tars, path=command(tars, "train/{6..8}", "echo one >&2; cat $f"))
        assert re.search(r"/train/8\.tar; .*: ended with status 1: cat: .*/8\.tar: No such file .*; mend it", message)
        message = refusal(piped, tars, path="pipe:exit 3", val_path=None)
        assert message.startswith("pipe:exit 3: ended with status 3: it said nothing")

    @pytest.mark.parametrize("then", ["head -c 700 $f", "echo no tar", "gzip -c $f", "true"])
    def test_so_is_what_is_no_whole_tar(self, tars, then):
        message = refusal(piped, tars, path=command(tars, "train/7", then))
        assert "what it writes cannot be read as a tar" in message and "train/7.tar" in message
        with lenient():
            source = piped(tars, path=command(tars, "train/{6..7}", f"case $f in *7.tar) {then};; *) cat $f;; esac"))
        assert len(source.split("train")) == EACH and "train/7.tar" in source.damaged()[0]

    def test_one_that_fails_for_a_moment_is_run_again(self, tars):
        once = f"test -e {tars}/tried || {{ touch {tars}/tried; exit 1; }}; cat $f"
        assert len(piped(tars, path=command(tars, "train/7", once)).split("train")) == EACH

    def test_one_that_fails_later_costs_its_own_samples_alone(self, tars):
        split = piped(tars).split("train")
        (tars / "set" / "train" / "2.tar").unlink()
        forget(tars)
        for index in range(len(split)):
            if index // EACH == 2:
                with pytest.raises(ImageError, match=rf"2\.tar.*{index:09d}\.png: ended with status 1: cat: "):
                    split.image(0, index)
            else:
                split.image(0, index)
        assert len(runs(tars)) == 7 + 3  # not for each sample of the one anew

    def test_one_that_writes_something_else_later_is_found_out(self, tars):
        split = piped(tars).split("train")
        write_tar(tars / "set" / "train" / "0.tar", captioned(EACH + 40))
        with pytest.raises(ImageError, match=r"wrote .* bytes, once .*; if that is right, remove .*\.index"):
            split.image(0, 0)
            forget(tars)
            split.image(0, 0)


def test_classes_come_by_commands_too(tmp_path):
    for number in range(2):
        members = {f"{n}.{k}": v for n in range(4) for k, v in (("png", png(n)), ("cls", str(n % 2)))}
        write_tar(tmp_path / f"{number}.tar", members)
    options = {"commands": True, "cache": str(tmp_path), "val_path": f"pipe:cat {tmp_path}/1.tar"}
    source = ClassShards(root=".", path=f"pipe:cat {tmp_path}/0.tar", **options)
    assert source.split("train").labels == source.split("val").labels == [0, 1, 0, 1]


def test_only_the_config_says_what_is_a_command(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    write_tar(tmp_path / "pipe:touch canary;.tar", captioned(2))
    source = CaptionShards(root=".", path="*.tar", commands=True, val_fraction=0, test_fraction=0)
    assert len(source.split("train")) == 2 and not os.path.exists("canary")
    options = {"root": ".", "path": f"pipe:touch {tmp_path}/canary"}
    message = refusal(CaptionShards, **options)
    assert "data.path=pipe:touch" in message and "VLM_COMMANDS=1" in message and not os.path.exists("canary")
    assert "give it as data.path" in refusal(CaptionShards, root="pipe:touch canary", commands=True)
    assert not os.path.exists("canary")


def test_settings_that_do_not_suit_are_refused_before_anything_is_run(tars):
    assert "data.source.cached_shards=3: give at least 4" in refusal(piped, tars, cached_shards=3)
    message = refusal(piped, tars, val_path=None)
    assert "data.val_path: not given; of 8 commands" in message and "data.source.cached_shards=4" in message
    assert runs(tars) == []
    assert set(piped(tars, val_path=None, cached_shards=8, val_fraction=0.3).splits) >= {"train", "val"}
