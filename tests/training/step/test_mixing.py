"""MixUp and CutMix against their definitions."""

import pytest
import torch
import torch.nn.functional as F

from vlm.errors import UserError
from vlm.tasks.classification.train import Mixing
from vlm.training.step.losses import class_loss


def test_without_any_alpha_nothing_changes():
    images, labels = torch.randn(4, 3, 8, 8), torch.tensor([0, 1, 2, 1])
    mixed, targets = Mixing(mixup=0.0, cutmix=0.0, num_classes=3)(images, labels)
    assert mixed is images and targets is labels


def test_mixup_blends_images_and_labels_alike():
    images, labels = torch.eye(4)[:, :, None, None].expand(4, 4, 6, 6)[:, :3].clone(), torch.tensor([0, 1, 2, 3])
    mixed, targets = Mixing(mixup=1.0, cutmix=0.0, num_classes=4)(images, labels)
    assert targets.sum(1).tolist() == pytest.approx([1.0] * 4)
    # Image i shines in channel i alone (the last one in none): its share can be read in pixels and in labels.
    torch.testing.assert_close(mixed[:, :, 0, 0], targets[:, :3])
    assert ((targets > 0) & (targets < 1)).any()


def test_cutmix_pastes_a_box_whose_area_is_the_share_of_the_label():
    images = torch.arange(4.0)[:, None, None, None].expand(4, 3, 16, 16).clone()
    mixed, targets = Mixing(mixup=0.0, cutmix=1.0, num_classes=4)(images, torch.arange(4))
    for row in range(4):
        shares = [(mixed[row, 0] == label).float().mean().item() for label in range(4)]
        assert targets[row].tolist() == pytest.approx(shares)
    assert ((targets > 0) & (targets < 1)).any()


def test_equal_seeds_mix_equally_and_both_kinds_come():
    mixing, images, labels = Mixing(mixup=0.5, cutmix=1.0, num_classes=4), torch.rand(4, 3, 16, 16), torch.arange(4)
    kinds = set()
    for seed in range(8):
        found = []
        for _ in range(2):
            torch.manual_seed(seed)
            found.append(mixing(images, labels))
        assert torch.equal(found[0][0], found[1][0]) and torch.equal(found[0][1], found[1][1])
        whole = [(found[0][0][0] == images[other]).all(0) for other in range(4)]
        kinds.add(bool(torch.stack(whole).any(0).all()))  # every pixel is some image's own: a box was pasted
    assert kinds == {True, False}


def test_a_batch_without_images():
    mixed, targets = Mixing(mixup=1.0, cutmix=1.0, num_classes=4)(torch.empty(0, 3, 8, 8), torch.empty(0).long())
    assert len(mixed) == len(targets) == 0


@pytest.mark.parametrize("name", ["mixup", "cutmix"])
def test_a_negative_alpha_is_refused(name):
    with pytest.raises(UserError, match=rf"task\.{name}: -1 is below 0"):
        Mixing(**{"mixup": 0.0, "cutmix": 0.0, "num_classes": 2, name: -1.0})


@pytest.mark.parametrize("smoothing", [0.0, 0.2])
def test_the_loss_of_labels_equals_that_of_their_shares(smoothing):
    logits, labels = torch.randn(5, 3), torch.tensor([0, 2, 1, 1, 0])
    total, count = class_loss(logits, labels, label_smoothing=smoothing)
    shares = F.one_hot(labels, 3).float()
    assert count == 5
    torch.testing.assert_close(class_loss(logits, shares, label_smoothing=smoothing)[0], total)
    target = shares * (1 - smoothing) + smoothing / 3
    torch.testing.assert_close(total, -(target * logits.log_softmax(-1)).sum())
