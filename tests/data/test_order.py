"""Orders and pairs of samples, by counting what comes."""

from collections import Counter
from functools import partial
from itertools import chain, pairwise

import numpy as np
import pytest
import torch
from class_data import lay_out

from vlm.data.fields import ImageField, LabelField
from vlm.data.images.class_augment import ClassAugment
from vlm.data.images.image import Preprocess
from vlm.data.records import BLOCK, find_block, find_partner
from vlm.data.samples import EvalBatches, RecordDataset, SampleKey, TrainBatches
from vlm.data.sources.class_folders import ClassFolders
from vlm.errors import UserError

SIZE, BATCH = 1000, 24


def train(epoch=0, done=0, **options):
    options = {"size": SIZE, "batch_size": BATCH, "seed": 5} | options
    return TrainBatches(position=lambda: (epoch, done), **options)


def lengths(epoch, size=SIZE):
    return np.random.default_rng(epoch).integers(20, 90, size)


def indices(batches):
    return [key.index for batch in batches for key in batch]


@pytest.mark.parametrize("lengths", [None, lengths])
@pytest.mark.parametrize("world", [2, 3])
def test_the_ranks_share_the_same_global_batches(world, lengths):
    alone = [indices([batch]) for batch in train(lengths=lengths)]
    ranks = [list(train(rank=rank, world=world, lengths=lengths)) for rank in range(world)]
    assert [sorted(indices(parts)) for parts in zip(*ranks, strict=True)] == [sorted(batch) for batch in alone]
    full = [len(part) for parts in zip(*ranks, strict=True) if len(indices(parts)) == BATCH for part in parts]
    assert set(full) == {BATCH // world}


@pytest.mark.parametrize("lengths", [None, lengths])
def test_the_order_is_a_function_of_seed_and_epoch(lengths):
    first = list(train(lengths=lengths))
    assert first == list(train(lengths=lengths))
    for epoch, other in ((0, train(seed=6, lengths=lengths)), (1, train(epoch=1, lengths=lengths))):
        again = indices(other)
        assert sum(a == b for a, b in zip(indices(first), again, strict=True)) < 10
        assert sorted(again) == list(range(SIZE)) and {key.epoch for batch in other for key in batch} == {epoch}


@pytest.mark.parametrize("done", [0, 1, 17, 41, 42])
def test_starting_at_a_position_gives_the_tail_of_the_epoch(done):
    for rank in (0, 1):
        whole = list(train(epoch=2, rank=rank, world=2, lengths=lengths))
        assert list(train(epoch=2, done=done, rank=rank, world=2, lengths=lengths)) == whole[done:]


def test_the_position_is_asked_when_iteration_starts():
    at = [0, 0]
    batches = TrainBatches(size=SIZE, batch_size=BATCH, seed=5, position=lambda: (at[0], at[1]))
    whole = list(batches)
    at[:] = 0, 40
    assert list(batches) == whole[40:]
    at[:] = 1, 0
    assert list(batches) == list(train(epoch=1))


def odd_lengths(epoch, size):
    """However long some samples are."""
    return [1000 if index % 5 == 0 else 1 for index in range(size)]


@pytest.mark.parametrize("own, options", [(None, {}), (lengths, {}), (odd_lengths, {"batch_tokens": 100, "bucket": 4})])
@pytest.mark.parametrize("world", [1, 2, 3])
def test_every_rank_has_as_many_batches_none_empty_and_all_samples_in_them(world, own, options):
    for size in range(1, 41):
        known = own and partial(own, size=size)
        given = {"size": size, "batch_size": 6, "world": world, "lengths": known, **options}
        ranks = [list(train(rank=rank, **given)) for rank in range(world)]
        assert {len(batches) for batches in ranks} == {len(train(**given))}
        assert all(batch for batches in ranks for batch in batches)
        seen = Counter(chain.from_iterable(map(indices, ranks)))
        assert len(seen) == (size if size >= world else 0)  # fewer samples than ranks are no batch
        assert set(seen.values()) <= {1}
        assert options or all(len(batch) <= 6 // world + 1 for batches in ranks for batch in batches)


def padding(sizes, **options):
    """The share of padding in batches of samples of these sizes."""
    batches = [sizes[indices([batch])] for batch in train(size=len(sizes), **options)]
    return 1 - sizes.sum() / sum(batch.max() * len(batch) for batch in batches)


@pytest.mark.parametrize("batch_size", [16, 64])
def test_lengths_leave_under_two_percent_padding(batch_size):
    """Five captions a row, their words as in Flickr8k: 11.8 on average, deviating by 3.8."""
    words = np.random.default_rng(0).normal(11.8, 3.8, (6000, 5)).round().clip(2, 36)
    rows = (words + 2).sum(1).astype(int)
    assert padding(rows, batch_size=batch_size, lengths=lambda epoch: rows) < 0.02
    assert padding(rows, batch_size=batch_size) > 0.1  # that they need it


def test_lengths_leave_the_order_of_batches_free():
    means = [lengths(0)[indices([batch])].mean() for batch in train(lengths=lengths)]
    rises = sum(later > earlier for earlier, later in pairwise(means))
    assert 10 < rises < len(means) - 10


@pytest.mark.parametrize("lengths", [None, lambda epoch: lengths(epoch, 100)])
def test_other_samples_are_repeated_in_other_epochs_and_all_ranks_share_them(lengths):
    options = {"repeats": 3, "size": 100, "batch_size": 12, "lengths": lengths}
    epochs = [list(chain.from_iterable(train(epoch, **options))) for epoch in range(12)]
    for keys in epochs:
        assert len(keys) == len(set(keys)) == 100
        shown = Counter(key.index for key in keys)
        assert sorted(shown.values()) == [1, *[3] * 33]  # 33 samples three times each, and what is left of another
    assert len({key.index for keys in epochs for key in keys}) > 95
    ranks = [list(train(rank=rank, world=2, **options)) for rank in range(2)]
    for whole, *shares in zip(train(**options), *ranks, strict=True):
        assert shares == [whole[0::2], whole[1::2]]
    assert list(train(done=5, **options)) == list(train(**options))[5:]


TOKENS = 600


@pytest.mark.parametrize("bucket", [1, 8])
@pytest.mark.parametrize("world", [1, 2, 3])
def test_batches_hold_about_so_many_tokens_and_every_sample_comes_once(world, bucket):
    options = {"lengths": lengths, "batch_tokens": TOKENS, "bucket": bucket}
    for epoch in (0, 1):
        sizes = lengths(epoch)
        alone = [indices([batch]) for batch in train(epoch, **options)]
        assert len(alone) == len(train(epoch, **options)) == round(lengths(0).sum() / TOKENS)  # the same in all epochs
        assert sorted(chain.from_iterable(alone)) == list(range(SIZE))
        held = np.array([sizes[batch].sum() for batch in alone])
        assert abs(held - held.mean()).max() <= 90 and abs(held.mean() - TOKENS) < 20  # to within a sample
        ranks = [list(train(epoch, rank=rank, world=world, **options)) for rank in range(world)]
        assert [sorted(indices(parts)) for parts in zip(*ranks, strict=True)] == [sorted(batch) for batch in alone]
        assert train(epoch, **options).global_batches(epoch)[3].tolist() == alone[3]
    assert list(train(2, done=7, **options)) == list(train(2, **options))[7:]
    assert list(train(**options)) != list(train(1, **options))


def test_tokens_as_a_measure_of_batches_leave_little_padding():
    sizes = np.random.default_rng(0).geometric(1 / 20, 6000) + 2
    options = {"lengths": lambda epoch: sizes}
    assert padding(sizes, batch_tokens=1500, bucket=16, **options) < 0.15 < 0.5 < padding(sizes, bucket=1, **options)


def test_samples_without_a_length_are_not_batched_by_tokens():
    with pytest.raises(UserError, match=r"data\.batch_tokens"):
        len(train(lengths=lambda _: [0] * SIZE, batch_tokens=100))


@pytest.mark.parametrize("world", [1, 2, 3])
@pytest.mark.parametrize("size", [0, 1, 7, 100, 101])
def test_evaluation_reads_each_sample_once(world, size):
    ranks = [EvalBatches(size=size, batch_size=6, rank=rank, world=world) for rank in range(world)]
    for batches in ranks:
        assert len(list(batches)) == len(batches)
        assert all(0 < len(batch) <= 6 // world for batch in batches)
    assert sorted(chain.from_iterable(map(indices, ranks))) == list(range(size))


def test_evaluation_keeps_the_order_and_survives_small_batches():
    assert indices(EvalBatches(size=10, batch_size=4)) == list(range(10))
    assert list(EvalBatches(size=5, batch_size=1, rank=1, world=2)) == [[SampleKey(0, 1)], [SampleKey(0, 3)]]


@pytest.mark.parametrize("size", [1, 2, 3, 7, BLOCK - 1, BLOCK, BLOCK + 1, 1000, 3 * BLOCK + 5])
def test_each_sample_has_another_of_its_block_and_is_that_of_one(size):
    blocks = [find_block(index, size) for index in range(size)]
    assert all(index in block for index, block in enumerate(blocks))
    assert sorted(index for block in {*blocks} for index in block) == [*range(size)]
    assert max(map(len, blocks)) <= BLOCK and max(map(len, blocks)) - min(map(len, blocks)) <= 1
    others = [find_partner(index, size) for index in range(size)]
    assert sorted(others) == [*range(size)]
    assert all(other in block for other, block in zip(others, blocks, strict=True))
    assert size == 1 or all(other != index for index, other in enumerate(others))


KEYS = [SampleKey(0, index) for index in range(6)]


@pytest.fixture
def source(tmp_path):
    lay_out(tmp_path, *(f"train/{name}/{n}.png" for name in ("cat", "dog") for n in range(3)))
    return ClassFolders(root=str(tmp_path))


def samples(source, **options):
    augment = ClassAugment(image_size=16, policy="randaugment", min_scale=0.3)
    labels = LabelField()
    labels.open(source, {}, seed=0, cache=None)
    fields = {"images": ImageField(preprocess=Preprocess(image_size=16), augment=augment), "labels": labels}
    return RecordDataset(source.split("train"), fields, **options)


def test_the_good_are_kept_and_the_bad_are_named(source, tmp_path):
    (tmp_path / "train" / "cat" / "1.png").write_bytes(b"no image")
    batch = samples(source).__getitems__(KEYS)
    assert batch.ids == [f"train/{name}.png" for name in ("cat/0", "cat/2", "dog/0", "dog/1", "dog/2")]
    assert batch["labels"].tolist() == [0, 0, 1, 1, 1] and len(batch["images"]) == 5
    assert [bad.id for bad in batch.bad] == ["train/cat/1.png"] and str(tmp_path) in batch.bad[0].reason
    nothing = samples(source).__getitems__([KEYS[1]])
    assert (nothing["images"].shape, nothing["images"].dtype) == ((0, 3, 16, 16), torch.uint8)
    assert (nothing["labels"].shape, nothing["labels"].dtype) == ((0,), torch.int64)
    assert (nothing.ids, nothing.bad) == ([], batch.bad)


def test_training_draws_by_seed_epoch_index_and_copy_where_there_are_copies(source):
    def pixels(*key, **options):
        return samples(source, **{"seed": 0, **options}).__getitems__([SampleKey(*key)])["images"]

    known = pixels(0, 1)
    assert torch.equal(known, pixels(0, 1))
    assert not torch.equal(known, pixels(1, 1)) and not torch.equal(known, pixels(0, 1, seed=1))
    assert not torch.equal(pixels(0, 1, 0, repeats=2), pixels(0, 1, 1, repeats=2))
    assert torch.equal(pixels(0, 1, seed=None), pixels(1, 1, seed=None))
