"""Building, with the classes of the package `strangers` (conftest.py)."""

from functools import partial
from pathlib import Path

import pytest

from vlm.config.build import build, spec
from vlm.errors import UserError

pytestmark = pytest.mark.usefixtures("strangers")


def node(name, **rest):
    return {"_target_": f"strangers.parts.{name}", **rest}


def test_build_goes_inside_out():
    built = build(
        node(
            "Model",
            encoder=node("ViT", dim=3, depth=4),
            parts=[node("make_base", dim=5)],
            make=node("ViT", _partial_=True, depth=1),
            window=[6, 7],
            sizes=[8, 9],
            names=["n"],
            root="/r",
            where="/w",
            anything={"deep": [node("Other")], "window": [1, 2]},
        ),
        "model",
        vocab_size=11,
    )
    got = built.given
    assert (type(got["encoder"]).__name__, got["encoder"].dim, got["encoder"].depth) == ("ViT", 3, 4)
    assert (type(got["parts"][0]).__name__, got["parts"][0].dim) == ("Base", 5)
    assert isinstance(got["make"], partial) and got["make"](dim=2).depth == 1
    assert (got["window"], got["sizes"], got["names"]) == ((6, 7), (8, 9), ["n"])
    assert (got["root"], got["where"]) == (Path("/r"), "/w")
    assert type(got["anything"]["deep"][0]).__name__ == "Other"
    assert got["anything"]["window"] == [1, 2]
    assert got["vocab_size"] == 11


def test_build_leaves_its_node_as_it_was():
    config = node("Model", window=[1, 2], encoder=node("ViT", dim=3))
    before = repr(config)
    build(config, "model", vocab_size=1)
    assert repr(config) == before


@pytest.mark.parametrize(
    ("config", "given", "said"),
    [
        (node("Picky", heads=3), {}, "model: 3 heads do not divide the width"),
        (
            node("Model", anything=node("Picky", heads=3)),
            {"vocab_size": 1},
            "model.anything: 3 heads do not divide the width",
        ),
        ({"dim": 1}, {}, "model: has no class to build; give it a _target_, or choose an option of its group"),
        (None, {}, "model: has no class to build; give it a _target_, or choose an option of its group"),
    ],
)
def test_build_reports_faults_with_their_path(config, given, said):
    with pytest.raises(UserError) as caught:
        build(config, "model", **given)
    assert str(caught.value) == said


def test_a_class_is_passed_what_it_takes_of_all_that_is_supplied():
    assert build(node("ViT"), "model", dim=3, vocab_size=11, nothing=1).dim == 3


def test_a_missing_file_names_itself(tmp_path):
    with pytest.raises(UserError, match=r"^model: .*no-such-file"):
        build(node("Lost", root=str(tmp_path / "no-such-file")), "model")


def test_build_makes_torchs_optimisers():
    import torch

    weight = torch.nn.Parameter(torch.zeros(2))
    made = build({"_target_": "torch.optim.AdamW", "lr": 1, "betas": [0.5, 0.6]}, "optim", params=[weight])
    assert isinstance(made, torch.optim.AdamW)
    assert made.defaults["betas"] == (0.5, 0.6)


def test_spec_is_plain_and_holds_no_target():
    got = spec(node("Model", vocab_size=3, window=[1, 2], anything=[node("ViT", dim=4)], root="/r"))
    assert got == {
        "name": "strangers.parts.Model",
        "args": {
            "vocab_size": 3,
            "window": (1, 2),
            "anything": [{"name": "strangers.parts.ViT", "args": {"dim": 4}}],
            "root": "/r",
        },
    }
    assert spec({"_target_": "vlm.data.images.image.ImageError", "message": "m"}) == {
        "name": "ImageError",
        "args": {"message": "m"},
    }


def test_a_partial_has_no_spec():
    with pytest.raises(ValueError, match="partial"):
        spec(node("ViT", _partial_=True))
