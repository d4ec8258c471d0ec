"""The reference model of training on preferences, and the cache of its scores."""

from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from vlm.data.images.augment import Augment
from vlm.data.records import ListSplit, Preference, Record
from vlm.errors import UserError
from vlm.nn.lora import LoRA
from vlm.tasks.preferences.reference import ReferenceCache, ReferenceModel, check_cacheable, identify_pairs

PAIR = Preference((("user", "what?"),), "a cat", "a dog")


def build_net(seed: int = 0) -> nn.Module:
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(3, 4), nn.Dropout(0.5), nn.Linear(4, 2))


def test_without_adapters_the_model_is_its_own_reference() -> None:
    net, x = build_net(), torch.randn(5, 3)
    truth = net.eval()(x)
    for parameter in net.parameters():
        parameter.requires_grad_(False)
    assert LoRA(rank=2, alpha=4, projections=["0", "2"]).adapt(net) == 2
    with torch.no_grad():
        for layer in (net[0], net[2]):
            layer.lora_b.normal_()
    reference = ReferenceModel(net.train(), None, Any)  # in the middle of a training
    reference.start = partial(pytest.fail, "the weights are not read again")
    assert not torch.equal(net.eval()(x), truth)
    assert torch.equal(reference.model()(x), truth) and not reference.model().training
    assert reference.model()[0].weight is net[0].weight  # no second copy
    assert not any(parameter.requires_grad for parameter in reference.model().parameters())


def test_the_reference_keeps_the_weights_from_which_training_starts() -> None:
    net, x = build_net(), torch.randn(5, 3)
    net[0].requires_grad_(False)
    truth = net.eval()(x)
    reference = ReferenceModel(net, None, Any)
    reference.start = build_net  # of the same seed
    reference.expected = reference.hash()
    with torch.no_grad():
        net[2].weight += 1
    reference.release()
    assert torch.equal(reference.model()(x), truth)
    assert reference.model()[0].weight is net[0].weight and reference.model()[2].weight is not net[2].weight
    reference.release()
    reference.start = partial(build_net, 1)
    with pytest.raises(UserError, match=r"other weights than when training began; restore those of model\.init_from"):
        reference.model()


def make_split(pairs: Any, stamp: str = "s") -> ListSplit:
    return ListSplit([0], lambda item, epoch: Record("r", {"pairs": pairs(epoch)}, read_stamp=lambda: stamp))


def test_scores_are_found_again_only_for_the_same_reference_and_the_same_data(tmp_path: Path) -> None:
    split = make_split(lambda epoch: [PAIR])
    scores = {"r#0": [-1 / 3, -2.5]}
    ReferenceCache(tmp_path / "cache", "reference", identify_pairs(split)).write(scores)
    assert ReferenceCache(tmp_path / "cache", "reference", identify_pairs(split)).read() == scores
    for identity in (
        ("other", identify_pairs(split)),
        ("reference", identify_pairs(make_split(lambda epoch: [PAIR._replace(rejected="a bird")]))),
        ("reference", identify_pairs(make_split(lambda epoch: [PAIR], "changed"))),
    ):
        assert ReferenceCache(tmp_path / "cache", *identity).read() is None
    (path,) = (tmp_path / "cache").iterdir()
    path.write_text(path.read_text()[:-3])  # damaged files are computed again
    assert ReferenceCache(tmp_path / "cache", "reference", identify_pairs(split)).read() is None
    path.unlink()
    (tmp_path / "cache").rmdir()
    (tmp_path / "cache").write_text("")
    with pytest.raises(UserError, match=r"cannot be written .*; free some space, or set task.cache_reference=false"):
        ReferenceCache(tmp_path / "cache", "reference").write(scores)


def test_data_that_change_between_epochs_cannot_be_cached() -> None:
    images: Any = SimpleNamespace(augment=Augment(image_size=32, min_scale=0.5))
    fresh = make_split(lambda epoch: [PAIR])
    fresh.fresh = True
    for split, field, reason in (
        (fresh, None, "other samples are read in every epoch; use other data"),
        (make_split(lambda epoch: [PAIR._replace(chosen=f"{epoch}")]), None, "set data.source.pairs_per_image=null"),
        (make_split(lambda epoch: [PAIR]), images, "data.augment changes images in every epoch"),
    ):
        with pytest.raises(UserError, match=f"task.cache_reference: .*{reason}.*, or set task.cache_reference=false"):
            check_cacheable(split, field)
