"""Checking and building, with the classes of the package `strangers` (conftest.py)."""

from functools import partial
from pathlib import Path

import pytest

from vlm.config.config import build, check, spec
from vlm.errors import UserError

pytestmark = pytest.mark.usefixtures("strangers")


def node(name, **rest):
    return {"_target_": f"strangers.parts.{name}", **rest}


def faults(config, **options):
    try:
        check(config, **options)
    except UserError as error:
        assert error.status == 2
        return str(error).splitlines()
    return []


def model(**rest):
    return {"model": node("Model", **{"vocab_size": 5, **rest})}


@pytest.mark.parametrize(
    "rest",
    [
        {"encoder": node("Base", dim=1)},
        {"encoder": node("ViT", dim=1, dropout=1)},
        {"encoder": node("make_base", dim=1)},
        {"encoder": None},
        {"like": node("ViT", dim=1)},
        {"size": 3},
        {"size": [3, 4]},
        {"window": [3, 4]},
        {"sizes": [1, 2, 3]},
        {"mode": "min"},
        {"ghost": "whatever it is"},
        {"root": "/x"},
        {"where": "/x"},
        {"names": ["a", "b"]},
        {"names": []},
        {"weights": {"a": 1, "b": 0.5}},
        {"parts": [node("ViT", dim=1), node("Base", dim=2)]},
        {"make": node("Other")},
        {"make": node("ViT", _partial_=True)},
        {"flag": True},
        {"limit": 1},
        {"limit": None},
        {"limit": float("inf")},
        {"late": None},
        {"anything": {"x": [1, "y"]}},
        {"anything": node("Loose", dim=1, what="ever")},
    ],
)
def test_what_fits_passes(rest):
    assert faults(model(**rest)) == []


@pytest.mark.parametrize(
    ("rest", "said"),
    [
        ({"dpeth": 1}, "model.dpeth: unknown"),
        ({"modes": "max"}, "model.modes: unknown; did you mean mode?"),
        ({"vocab_size": "5"}, "model.vocab_size: '5' is str, expected int"),
        ({"vocab_size": True}, "model.vocab_size: True is bool, expected int"),
        ({"vocab_size": 5.0}, "model.vocab_size: 5.0 is float, expected int"),
        ({"vocab_size": None}, "model.vocab_size: None, expected int"),
        ({"limit": "1e-3"}, "model.limit: '1e-3' is str, expected float | None"),
        ({"limit": True}, "model.limit: True is bool, expected float | None"),
        ({"flag": 1}, "model.flag: 1 is int, expected bool"),
        ({"names": "abc"}, "model.names: 'abc' is str, expected list[str]"),
        ({"names": ["a", 1]}, "model.names: ['a', 1] is list, expected list[str]"),
        ({"window": [1]}, "model.window: [1] is list, expected tuple[int, int]"),
        ({"window": [1, "2"]}, "model.window: [1, '2'] is list, expected tuple[int, int]"),
        ({"sizes": [1, None]}, "model.sizes: [1, None] is list, expected tuple[int, ...]"),
        ({"weights": {"a": "b"}}, "model.weights: {'a': 'b'} is dict, expected Mapping[str, float]"),
        ({"mode": "mxa"}, "model.mode: 'mxa' is unknown; choose from max, min; did you mean max?"),
        ({"mode": 1}, "model.mode: 1 is int, expected 'max' | 'min'"),
        ({"root": 3}, "model.root: 3 is int, expected Path | None"),
        ({"encoder": "vit"}, "model.encoder: 'vit' is str, expected Base | None"),
        ({"encoder": {"dim": 1}}, "model.encoder: {'dim': 1} is dict, expected Base | None"),
        ({"encoder": node("Other")}, "model.encoder: Other does not fit here, expected Base | None"),
        ({"encoder": node("ViT", _partial_=True)}, "model.encoder: partial does not fit here, expected Base | None"),
        ({"make": node("ViT", dim=1)}, "model.make: ViT does not fit here, expected Callable | None"),
        ({"make": "print"}, "model.make: 'print' is str, expected Callable | None"),
        ({"encoder": node("ViT")}, "model.encoder.dim: missing; ViT needs it"),
        ({"encoder": node("ViT", dim=1, dpeth=2)}, "model.encoder.dpeth: unknown; did you mean depth?"),
        ({"parts": [node("ViT", dim=1), node("ViT", dmi=1, dim=2)]}, "model.parts.1.dmi: unknown; did you mean dim?"),
        (
            {"parts": [node("Other")]},
            "model.parts: [{'_target_': 'strangers.parts.Other'}] is list, expected Iterable[Base]",
        ),
        ({"_args_": [1]}, "model._args_: unknown"),
        ({"_partial_": "yes"}, "model._partial_: 'yes' is str, expected bool"),
    ],
)
def test_what_does_not_fit_is_named(rest, said):
    assert faults(model(**rest)) == [said]


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("os.system", "os.system may not be built; only vlm.*, lightning.*, torch.optim.*, strangers.* may"),
        ("torch.load", "torch.load may not be built; only vlm.*, lightning.*, torch.optim.*, strangers.* may"),
        ("strangers.parts.os.system", "strangers.parts.os.system may not be built; a target is a class of"),
        ("strangers.parts.Path", "strangers.parts.Path may not be built; a target is a class of"),
        ("strangers.parts", "strangers.parts may not be built; a target is a class of"),
        ("strangers.parts.Size", "strangers.parts.Size may not be built; a target is a class of"),
        ("lightning.seed_everything", "lightning.seed_everything may not be built; a target is a class of"),
        ("strangers.parts.__builtins__", "is not the dotted name of something public"),
        ("strangers..parts", "is not the dotted name of something public"),
        ("strangers.parts.Vit", "there is no strangers.parts.Vit; did you mean strangers.parts.ViT?"),
        ("strangers.prats.ViT", "there is no strangers.prats.ViT; did you mean strangers.parts.ViT?"),
        ("torch.optim.Adamw", "there is no torch.optim.Adamw; did you mean torch.optim.AdamW?"),
        ("lightning.pytorch.callbacks.EarlyStoping", "did you mean lightning.pytorch.callbacks.EarlyStopping?"),
        (3, "3 may not be built"),
    ],
)
def test_a_target_is_a_known_class(name, said):
    (line,) = faults({"a": {"b": [{"_target_": name}]}})
    assert line.startswith("a.b.0._target_: ")
    assert said in line


def test_checking_imports_nothing():
    assert faults({"x": {"_target_": "strangers.explosive.Quiet", "b": 1}}) == [
        "x.b: unknown",
        "x.a: missing; Quiet needs it",
    ]


def test_lightnings_names_and_types_are_checked():
    trainer = {
        "_target_": "lightning.Trainer",
        "max_epoch": 1,
        "max_epochs": "abc",
        "precision": "bf17-mixed",
        "devices": [0],
    }
    lines = faults({"trainer": {**trainer, "callbacks": [{"_target_": "torch.optim.AdamW", "lr": 1}]}}, supplied={})
    assert lines[0] == "trainer.max_epoch: unknown; did you mean max_epochs?"
    assert lines[1] == "trainer.max_epochs: 'abc' is str, expected int | None"
    assert lines[2].startswith("trainer.precision: 'bf17-mixed' is unknown; choose from ")
    assert lines[2].endswith("; did you mean bf16-mixed?")
    assert "expected list[Callback] | Callback | None" in lines[3]
    assert lines[4:] == ["trainer.callbacks.0.params: missing; AdamW needs it"]


def test_every_fault_is_reported_at_once():
    config = {
        "a": node("ViT", dmi=1),
        "b": {"c": node("Model", mode="x", flag=2)},
        "seed": "s",
        "free": {"any": "thing"},
    }
    lines = faults(config, types={"seed": int, "name": str | None, "free.any": str})
    assert [line.split(":")[0] for line in lines] == [
        "a.dmi",
        "a.dim",
        "b.c.mode",
        "b.c.flag",
        "b.c.vocab_size",
        "seed",
    ]


def test_what_the_program_supplies_is_not_missing_and_may_not_be_given():
    supplied = {"model": {"vocab_size"}, "elsewhere": {"x"}}
    assert faults({"model": node("Model")}, supplied=supplied) == []
    assert faults(model(), supplied=supplied) == ["model.vocab_size: is filled in by the program; remove it"]


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
        (node("ViT", dmi=1), {}, "model.dmi: unknown; did you mean dim?\nmodel.dim: missing; ViT needs it"),
        (node("ViT", dim=1), {"vocab_size": 3}, "model: ViT takes no vocab_size"),
        (node("ViT", dim=1), {"dim": 3}, "model.dim: is filled in by the program; remove it"),
        (node("Picky", heads=3), {}, "model: 3 heads do not divide the width"),
        (
            node("Model", encoder=node("Picky", heads=3)),
            {"vocab_size": 1},
            "model.encoder: Picky does not fit here, expected Base | None",
        ),
        (
            node("Model", anything=node("Picky", heads=3)),
            {"vocab_size": 1},
            "model.anything: 3 heads do not divide the width",
        ),
        ({"dim": 1}, {}, "model: names nothing to build; give it a _target_, or choose an option of its group"),
        (None, {}, "model: names nothing to build; give it a _target_, or choose an option of its group"),
        (
            {"_target_": "strangers.needy.Quiet", "a": 1},
            {},
            "model._target_: strangers.needy.Quiet needs the package not_installed_anywhere; install it",
        ),
    ],
)
def test_build_reports_faults_with_their_path(config, given, said):
    with pytest.raises(UserError) as caught:
        build(config, "model", **given)
    assert str(caught.value) == said


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
