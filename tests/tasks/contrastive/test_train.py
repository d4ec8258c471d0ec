"""Recall among images and captions, by sorting and by enumeration; the loss by hand, and in 16 bits."""

from itertools import permutations

import pytest
import torch
import torch.nn.functional as F

from vlm.errors import UserError
from vlm.tasks.contrastive.train import DEPTHS, NAMES, RetrievalMetric, contrastive_loss, rank_candidates

COUNTS = [5, 1, 3, 2, 5, 4, 5]  # captions of each image


def embeddings(count, dim=4):
    return F.normalize(torch.randn(count, dim), dim=1)


def samples(counts=COUNTS):
    """Images as the metric takes them: ids, captions, embeddings, and those of captions and of their words alone."""
    captions = [[f"caption {n} of {image}" for n in range(count)] for image, count in enumerate(counts)]
    texts = [torch.cat([embeddings(count), embeddings(count)]) for count in counts]
    return [f"{image:03d}" for image in range(len(counts))], captions, embeddings(len(counts)), texts


def metric(*parts):
    made = RetrievalMetric()
    for part in parts:
        made.update(*part)
    return made


def by_sorting(images, texts, counts):
    """The recalls, from sorted lists of candidates."""
    owners = [image for image, count in enumerate(counts) for _ in range(count)]
    captions = torch.cat([both[:count] for both, count in zip(texts, counts, strict=True)])
    products = (images @ captions.T).tolist()
    hits = {name: [] for name in NAMES}
    for depth in DEPTHS:
        for image, row in enumerate(products):
            found = sorted(range(len(row)), key=lambda place: -row[place])[:depth]
            hits[f"text_recall_{depth}"].append(any(owners[place] == image for place in found))
        for place, owner in enumerate(owners):
            found = sorted(range(len(images)), key=lambda image: -products[image][place])[:depth]
            hits[f"image_recall_{depth}"].append(owner in found)
    return {name: sum(values) / len(values) for name, values in hits.items()}


def test_recall_equals_that_of_sorted_lists():
    ids, captions, images, texts = samples()
    scores = metric((ids, captions, images, texts)).compute()
    truth = by_sorting(images, texts, COUNTS)
    assert scores == pytest.approx(truth | {"recall": sum(truth.values()) / 6})


def test_parts_in_any_order_and_twice_are_one(monkeypatch):
    ids, captions, images, texts = samples()
    whole = metric((ids, captions, images, texts))
    part = [(ids[a:b], captions[a:b], images[a:b], texts[a:b]) for a, b in ((4, 7), (0, 4), (3, 5))]
    parts = metric(*part)
    for made in (whole, parts):
        made.compute()
    assert parts.compute() == whole.compute() and parts.controls() == whole.controls()
    assert parts.ranks == whole.ranks and parts.intervals(seed=1) == whole.intervals(seed=1)
    assert parts.loss(7.0) == whole.loss(7.0)
    before = whole.compute(), whole.loss(7.0)
    monkeypatch.setattr("vlm.tasks.contrastive.train.AT_ONCE", 2)
    assert whole.compute() == before[0] and whole.loss(7.0) == pytest.approx(before[1])


def test_ranks_by_hand():
    one = embeddings(1)  # a caption that two images share is wrong for either
    assert rank_candidates(one, torch.tensor([0]), one.repeat(2, 1), torch.tensor([0, 1]))[0].tolist() == [1]
    images, texts = torch.eye(2), torch.tensor([[0.1, 0.9], [0.8, 0.1], [0.2, 0.3], [0.3, 0.7]])
    own, first = rank_candidates(
        images, torch.tensor([0, 1]), texts, torch.tensor([0, 0, 1, 1])
    )  # any own caption is right
    assert own.tolist() == [0, 1] and first.tolist() == [1, 0]


def test_what_tells_nothing_finds_nothing():
    ids, captions, images, texts = samples([2] * 30)
    same = [torch.ones_like(both) for both in texts]
    assert set(metric((ids, captions, torch.ones_like(images), same)).compute().values()) == {0.0}
    with pytest.raises(UserError, match="no image could be read"):
        metric(([], [], torch.empty(0, 4), [])).compute()


def test_controls_by_hand():
    """Chance by all orders; captions of other images find what chance does; words alone are scored as captions are."""
    counts = [2, 1, 3]
    ids, captions, images, texts = samples(counts)
    made = metric((ids, captions, images, texts))
    made.compute()
    controls = made.controls()
    orders = list(permutations([0, 0, 1, 2, 2, 2]))
    for depth in (1, 5):
        hits = [image in order[:depth] for order in orders for image in range(3)]
        assert controls[f"text_recall_{depth}@chance"] == pytest.approx(sum(hits) / len(hits))
    assert controls["image_recall_1@chance"] == pytest.approx(1 / 3) and controls["image_recall_5@chance"] == 1
    bags = [torch.cat([both[count:], both[:count]]) for both, count in zip(texts, counts, strict=True)]
    truth = by_sorting(images, bags, counts)
    assert {name: controls[f"{name}@bag"] for name in NAMES} == pytest.approx(truth)


def test_captions_of_other_images_find_what_chance_does():
    counts = [1] * 60
    ids, captions, images, _ = samples(counts)
    texts = [torch.stack([image, image]) for image in images]  # a perfect model
    made = metric((ids, captions, images, texts))
    assert set(made.compute().values()) == {1.0}
    controls = made.controls()
    for name in NAMES:
        assert controls[f"{name}@shuffled"] == pytest.approx(controls[f"{name}@chance"], abs=0.15)
    bounds = made.intervals(seed=0)
    assert bounds["text_recall_1@low"] == bounds["image_recall_10@high"] == 1.0


def test_the_loss_is_that_of_one_batch():
    ids, captions, images, texts = samples()
    made = metric((ids, captions, images, texts))
    made.compute()
    logits = 9 * images @ torch.stack([both[0] for both in texts]).T
    places = torch.arange(len(images))
    truth = (F.cross_entropy(logits, places) + F.cross_entropy(logits.T, places)) / 2
    assert made.loss(9.0) == pytest.approx(truth.item(), rel=1e-5)


@pytest.fixture
def pairs():
    return [F.normalize(torch.randn(5, 7), dim=1) for _ in range(2)]


@pytest.mark.parametrize("smoothing", [0.0, 0.1])
def test_each_side_picks_its_half(pairs, smoothing):
    left, right = pairs
    total, count = contrastive_loss(left, right, torch.tensor([9.0]), label_smoothing=smoothing)
    expected = 0.0
    for one, other in ((left, right), (right, left)):
        for place, row in enumerate(one):
            chances = torch.stack([9 * row @ candidate for candidate in other]).log_softmax(0)
            expected -= (1 - smoothing) * chances[place] + smoothing * chances.mean()
    assert count == 5 and total.item() == pytest.approx(expected.item() / 2, rel=1e-5)


def test_products_are_taken_in_32_bits(pairs):
    scale = torch.tensor([100.0])
    truth, _ = contrastive_loss(*pairs, scale)
    with torch.autocast("cpu", torch.bfloat16):
        total, _ = contrastive_loss(*pairs, scale)
    assert total.dtype == torch.float32 and total.item() == truth.item()
