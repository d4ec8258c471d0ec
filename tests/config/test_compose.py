"""Composing, and overrides of configs that were saved."""

import argparse
import re
from pathlib import Path

import pytest
from hydra.core.global_hydra import GlobalHydra

from vlm.config import compose as composing
from vlm.config.compose import compose, explain_hydra_errors, override
from vlm.errors import UserError


class TestCompose:
    def test_gives_resolved_plain_containers(self):
        got = compose(["seed=3", "model.dim=16"])
        assert got == {
            "seed": 3,
            "name": "captioning",
            "model": {"dim": 16, "twice": 32, "encoder": {"depth": 2, "width": 16}},
            "data": {"size": 64, "num_workers": 1, "root": None},
            "optim": {"_target_": "torch.optim.AdamW", "_partial_": True, "lr": 0.001, "betas": [0.9, 0.98]},
            "task_name": "captioning",
            "task": {"smoothing": 0.0},
        }
        assert got.tree["model"] == {
            "dim": 16,
            "twice": "${sum:${model.dim},${model.dim}}",
            "encoder": {"depth": 2, "width": "${model.dim}"},
        }
        assert type(got["model"]) is dict and type(got["optim"]["betas"]) is list

    def test_options_of_groups_and_of_their_groups(self):
        got = compose(["data=flickr8k", "model/encoder=resnet", "experiment=long"])
        assert got["data"]["root"] == "data/flickr8k"
        assert got["model"]["encoder"] == {"blocks": 3}
        assert got["seed"] == 9

    def test_a_missing_value_names_its_key(self):
        with pytest.raises(UserError, match=r"^data\.root: has no value; give data\.root=VALUE$") as caught:
            compose(["data=captions"])
        assert caught.value.status == 2

    def test_leaves_no_global_state(self):
        compose([])
        with pytest.raises(UserError):
            compose(["nonsense=1"])
        assert not GlobalHydra.instance().is_initialized()

    def test_the_shipped_folder_lies_beside_the_package_or_in_it(self, monkeypatch):
        monkeypatch.undo()
        assert composing.conf_dir().parent in Path(composing.__file__).parents[1:3]
        assert (composing.conf_dir() / "config.yaml").is_file()


class TestOverride:
    def test_sets_values_of_a_saved_config(self):
        saved = compose(["name=/literal/x"]).tree
        saved["name"] = r"\${not.an.interpolation}"
        got = override(saved, ["data.root=/a,b", "seed=5"])
        assert (got["data"]["root"], got["seed"], got["name"]) == ("/a,b", 5, "${not.an.interpolation}")
        assert saved["seed"] == 0

    @pytest.mark.slow
    def test_puts_an_option_in_the_place_of_a_group(self):
        saved = compose(["model.dim=4"]).tree
        got = override(saved, ["data.num_workers=0", "data=captions", "data.root=/x"])
        assert got["data"] == {"size": 224, "num_workers": 0, "root": "/x"}
        assert override(saved, ["model/encoder=vit"])["model"]["encoder"] == {"depth": 2, "width": 4}

    def test_the_values_of_a_chosen_group_follow_too(self):
        got = override(compose(["model.dim=4"]).tree, ["model=tiny", "model.dim=6"])
        assert got["model"] == {"dim": 6, "twice": 12, "encoder": {"depth": 2, "width": 6}}

    @pytest.mark.parametrize(
        ("given", "said"),
        [
            ("data=flikr8k", "did you mean flickr8k"),
            ("experiment=long", "sets keys of several groups"),
            ("data.rot=1", "data.rot: unknown; did you mean root?"),
            ("model.encoder=vit", "the group of an option has slashes; write model/encoder=vit"),
            ("seed=1,2", "with one value"),
        ],
    )
    def test_refuses_what_it_cannot_apply(self, given, said):
        with pytest.raises(UserError, match=re.escape(said)):
            override(compose([]).tree, [given])

    def test_names_every_fault_at_once(self):
        with pytest.raises(UserError) as caught:
            override(compose([]).tree, ["data.rot=1", "data=flikr8k"])
        option, key = str(caught.value).splitlines()
        assert option.startswith("data=flikr8k: unknown; choose from captions")
        assert key == "data.rot: unknown; did you mean root?"


def test_an_interrupt_within_omegaconf_stays_one():
    """OmegaConf's blocks that restore flags fail where Ctrl-C strikes, and it hides what was raised before."""
    with pytest.raises(KeyboardInterrupt), explain_hydra_errors(argparse.Namespace()):
        try:
            raise KeyboardInterrupt
        finally:
            error = AttributeError("'NoneType' object has no attribute '_invalidate_flags_cache'")
            error.__cause__ = None
            raise error
