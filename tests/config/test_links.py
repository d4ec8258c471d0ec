"""Overrides of a saved config reach every key that the overridden one fed when it was composed."""

import re

import pytest
from omegaconf import OmegaConf

from vlm.config import compose  # noqa: F401 registers the formulas
from vlm.config.links import FORMULAS, feed, links, origins
from vlm.config.override import apply, plain
from vlm.errors import UserError
from vlm.training.config.overrides import check_effective, check_resume_overrides

RAW = {
    "data": {"root": "/old", "path": None, "max_len": 32, "source": {"root": "${data.root}", "path": "${data.path}"}},
    "task": {"max_tokens": "${sum:${data.max_len},-2}", "label": "of ${data.root}"},
    "model": {"size": {"dim": 8, "heads": 2}, "width": "${model.size.dim}", "position": {"dim": "${model.width}"}},
    "decoder": {"positions": "${model.position}", "head": "${div:${model.size.dim},${model.size.heads}}"},
    "trainer": {"max_epochs": 3},
    "schedule": {"epochs": "${trainer.max_epochs}", "literal": r"\${data.root}"},
}


def saved():
    tree = OmegaConf.create(RAW)
    return {**plain(tree), **links(tree)}


def test_links_are_what_was_interpolated():
    assert FORMULAS.keys() == {"sum", "div"}
    found = saved()
    assert found["fed"]["data.root"] == ["data.source.root", "task.label"]
    assert found["fed"]["data.max_len"] == ["task.max_tokens"]
    assert found["fed"]["model.position"] == ["decoder.positions"]
    assert found["computed"] == {
        "task.max_tokens": ["sum", "data.max_len", -2],
        "task.label": None,
        "decoder.head": ["div", "model.size.dim", "model.size.heads"],
    }


@pytest.mark.parametrize(
    ("given", "changed"),
    [
        (["data.path=/new"], {"data.source.path": "/new"}),
        (["data.root=/new", "task.label=x"], {"data.source.root": "/new"}),
        (["data.root=/new", "task.label=x", "data.source.root=/mine"], {"data.source.root": "/mine"}),
        (["data.max_len=20"], {"task.max_tokens": 18}),
        (
            ["model.size.dim=12"],
            {"model.width": 12, "model.position.dim": 12, "decoder.positions.dim": 12, "decoder.head": 6},
        ),
        (["model.position.dim=5"], {"decoder.positions.dim": 5}),
        (["model.size={dim: 20}"], {"model.width": 20, "decoder.positions.dim": 20, "decoder.head": 10}),
    ],
)
def test_an_override_reaches_what_the_key_fed(given, changed):
    """As if it had been composed so: the independent truth is OmegaConf's own resolution."""
    got, _ = apply(saved(), given)
    for key, value in changed.items():
        assert OmegaConf.select(OmegaConf.create(got), key) == value
    tree = OmegaConf.create(RAW)
    for text in given:
        key, _, value = text.partition("=")
        OmegaConf.update(
            tree, key, OmegaConf.create(value) if value.startswith("{") else int(value) if value.isdigit() else value
        )
    composed = plain(tree)
    assert {key: got[key] for key in composed} == composed


def test_what_cannot_be_computed_anew_is_named():
    with pytest.raises(UserError, match=re.escape("data.root: task.label was computed of it")):
        apply(saved(), ["data.root=/new"])


def test_a_circle_ends():
    config = {"a": 1, "b": 1}
    assert feed(config, {"fed": {"a": ["b"], "b": ["a"]}}, ["a"]) == {"a": ["b"]}


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ("data.path=null", "data.path: is None already and changes nothing"),
        ("task.max_tokens=30", "task.max_tokens: is 30 already and changes nothing"),
        ("model.size.heads=4", "model.size.heads: changes nothing here"),
        ("data.nothing=1", "data.nothing: changes nothing here"),
    ],
)
def test_an_override_that_changes_nothing_is_refused(given, said):
    before = saved()
    before["data"]["nothing"] = 0
    after, taken = apply(before, [given])
    with pytest.raises(UserError, match=re.escape(said)):
        check_effective(
            before, after, taken, lambda key: key.startswith(("model.", "decoder.", "data.path", "data.nothing"))
        )


def test_a_resumed_run_changes_nothing_that_is_made_of_what_may_change():
    with pytest.raises(UserError, match=re.escape("trainer.max_epochs: schedule.epochs is made of it")):
        check_resume_overrides(["trainer.max_epochs=9"], saved())
    assert check_resume_overrides(["trainer.max_epochs=3"], saved()) == saved()


def test_a_fault_is_named_by_the_key_that_was_typed():
    config = saved()
    wrong = ["model.width: is wrong", "decoder.positions.dim: is wrong too", "decoder.head: is wrong", "alone"]
    assert origins(config, wrong) == ["model.size.dim: is wrong too", "alone"]
    own = [
        "data.max_len: is wrong",
        "data.max_len: and more",
        "model.size.heads: is wrong",
    ]
    assert origins(config, [*own, "task.max_tokens: is computed of it"]) == own


def test_a_fault_of_a_value_that_was_overridden_where_it_is_used_is_its_own():
    config, _ = apply(saved(), ["model.width=7"])
    assert origins(config, ["model.width: is wrong"]) == ["model.width: is wrong"]
