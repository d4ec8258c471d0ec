import torch

from vlm.data.batch import PADDING, BadSample, Sample, collate, pack


def test_pack_lays_sequences_end_to_end():
    tokens, segments = pack([[[1, 5, 2], [1, 2]], [[1, 6, 7, 8, 9, 2]], []], pad_id=3)
    assert tokens.tolist() == [[1, 5, 2, 1, 2, 3], [1, 6, 7, 8, 9, 2], [3] * 6]
    assert segments.tolist() == [[1, 1, 1, 2, 2, PADDING], [1] * 6, [PADDING] * 6]
    assert tokens.dtype == segments.dtype == torch.long


def sample(name, value, captions):
    return Sample(name, torch.full((3, 4, 4), value, dtype=torch.uint8), captions, [f"about {name}"])


def test_collate_keeps_the_good_and_names_the_bad():
    bad = BadSample("c.jpg", "cut short")
    batch = collate([sample("a", 7, [[1, 2]]), bad, sample("b", 9, [[1, 5, 2], [1, 2]])], pad_id=0, image_size=4)
    assert batch.images.shape == (2, 3, 4, 4)
    assert batch.images[:, 0, 0, 0].tolist() == [7, 9]
    assert batch.tokens.tolist() == [[1, 2, 0, 0, 0], [1, 5, 2, 1, 2]]
    assert batch.segments.tolist() == [[1, 1, 0, 0, 0], [1, 1, 1, 2, 2]]
    assert (batch.ids, batch.references, batch.bad) == (["a", "b"], [["about a"], ["about b"]], [bad])


def test_collate_of_nothing_but_bad_samples():
    batch = collate([BadSample("c.jpg", "cut short")], pad_id=0, image_size=4)
    assert (batch.images.shape, batch.images.dtype) == ((0, 3, 4, 4), torch.uint8)
    assert batch.tokens.shape == batch.segments.shape == (0, 0)
    assert batch.tokens.dtype == torch.long
    assert (batch.ids, len(batch.bad)) == ([], 1)
