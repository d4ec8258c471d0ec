"""Short names of classes: one class each, found in the sources, and the same wherever its module lies."""

import importlib
import re

import pytest
import yaml

from vlm.config.compose import conf_dir
from vlm.config.target import expand_name, modules_by_class, shorten_name
from vlm.errors import UserError


def test_every_name_is_one_class_of_ours():
    assert {name: found for name, found in modules_by_class().items() if len(found) > 1} == {}
    for name in ("ViT", "Decoder", "CharTokenizer", "Captions", "Cosine", "EMA", "CSVLogger", "Captioning", "Muon"):
        (module,) = modules_by_class()[name]
        assert getattr(importlib.import_module(module), name).__module__ == module


def targets(value):
    if isinstance(value, dict):
        yield from ([value["_target_"]] if "_target_" in value else [])
        for child in value.values():
            yield from targets(child)


def test_every_shipped_target_has_a_short_name_that_leads_back():
    found = {name for path in conf_dir().rglob("*.yaml") for name in targets(yaml.safe_load(path.read_text()))}
    assert len(found) > 30
    for target in found:
        assert expand_name(shorten_name(target)) == target
        assert ("." in shorten_name(target)) == (not target.startswith("vlm."))


def test_a_name_is_the_same_when_its_module_has_moved():
    assert shorten_name("vlm.some.other.place.ViT") == "ViT"
    assert expand_name("ViT") == "vlm.models.vit.ViT"


@pytest.mark.parametrize("target", ["vlm.models.vit.Nothing", "vlm.checkpoint.file.write", "vlm.models.vit"])
def test_what_is_no_class_of_a_run_cannot_be_stored(target):
    with pytest.raises(UserError, match=re.escape(target)):
        shorten_name(target)


@pytest.mark.parametrize("name", ["Nothing", "vlm.models.vit.ViT", "", "UserError"])
def test_an_unknown_name_is_refused(name):
    with pytest.raises(UserError, match="this version of vlm does not have"):
        expand_name(name)


def test_names_of_other_packages_stay_dotted():
    for name in ("torch.optim.AdamW", "lightning.Trainer", "mine.nets.Net"):
        assert expand_name(name) == shorten_name(name) == name
