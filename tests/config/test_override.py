"""Overrides after resume, and of saved configs."""

import re

import pytest
from hydra.core.override_parser.overrides_parser import OverridesParser
from hypothesis import example, given
from hypothesis import strategies as st

from vlm.config.compose import override
from vlm.config.override import quote
from vlm.config.tree import escape, resolve
from vlm.errors import UserError
from vlm.training.config.nodes import check_resume_overrides, split_option

SAVED = resolve(
    {
        "seed": 3,
        "data": {"root": "/data/a", "num_workers": 2, "batch_size": 8},
        "trainer": {"_target_": "lightning.Trainer", "max_epochs": 5, "precision": "32-true"},
        "callbacks": {"ema": {"decay": 0.9}, "names": ["a", "b"]},
        "logger": {"csv": {}},
        "model": {"_target_": "vlm.models.vit.ViT", "dim": 64},
    }
)


@pytest.mark.parametrize(
    ("argv", "resume", "rest"),
    [
        (["seed=1"], None, ["seed=1"]),
        (["resume=last"], "last", []),
        (["a=1", "resume=runs/x y", "b=2"], "runs/x y", ["a=1", "b=2"]),
        (["resume=runs/a=b,(c)"], "runs/a=b,(c)", []),
        (["resume='runs/x y'"], "runs/x y", []),
        (["+resume=last"], "last", []),
        (["resume=null", "seed=1"], None, ["seed=1"]),
        (["resume="], None, []),
        (["resumed=1", "x.resume=2"], None, ["resumed=1", "x.resume=2"]),
    ],
)
def test_resume_is_taken_out(argv, resume, rest):
    assert split_option(argv, "resume") == (resume, rest)


def test_resume_given_twice_is_refused():
    with pytest.raises(UserError, match="2 times"):
        split_option(["resume=a", "resume=b"], "resume")


def test_what_may_change_after_resume_does():
    overrides = ["trainer.max_epochs=9", "data.num_workers=0", "callbacks.ema.decay=0.5", "+trainer.fast_dev_run=true"]
    got = check_resume_overrides([*overrides, "logger.csv=null", "~callbacks.names"], SAVED)
    assert got["trainer"] == {**SAVED["trainer"], "max_epochs": 9, "fast_dev_run": True}
    assert got["data"] == {**SAVED["data"], "num_workers": 0}
    assert got["callbacks"] == {"ema": {"decay": 0.5}}
    assert got["logger"] == {"csv": None}
    assert (got["seed"], got["model"]) == (SAVED["seed"], SAVED["model"])


def test_no_overrides_leave_the_saved_config():
    assert check_resume_overrides([], SAVED) == SAVED


@pytest.mark.parametrize(
    "text", ["data.root=/data/b c", "seed=4", "data.num_workersx=1", "model=base", "~seed", "trainers.x=1"]
)
def test_anything_else_is_refused_with_both_values(text):
    with pytest.raises(UserError) as caught:
        check_resume_overrides([text, "trainer.max_epochs=9"], SAVED)
    key, _, value = text.lstrip("~").partition("=")
    node = SAVED
    for part in key.split("."):
        node = node.get(part, {}) if isinstance(node, dict) else {}
    saved = node if not isinstance(node, dict) else node.get("_target_", "not set")
    assert str(caught.value).startswith(f"{key}: was {saved} and cannot become {value or None} ")
    assert caught.value.status == 2


@pytest.mark.parametrize("text", ["seed=3", "data.root=/data/a"])
def test_a_value_that_the_run_has_may_be_repeated(text):
    assert check_resume_overrides([text], SAVED) == SAVED
    with pytest.raises(UserError, match="cannot become"):
        check_resume_overrides([f"{text}1"], SAVED)


def test_every_refusal_is_named():
    with pytest.raises(UserError) as caught:
        check_resume_overrides(["seed=1", "data.root=x", "-m", "trainer=cpu"], SAVED)
    assert [line.split(":")[0] for line in str(caught.value).splitlines()] == ["seed", "data.root", "-m", "trainer=cpu"]


def test_a_dict_that_is_one_value_takes_the_other_s_place():
    config = {"task": {"_target_": "vlm.tasks.captioning.train.Captioning", "reward": {"cider": 1, "likelihood": 0.1}}}
    assert override(config, ["task.reward={bleu4: 2}"])["task"]["reward"] == {"bleu4": 2}
    assert override(config, ["+task.reward.bleu4=2"])["task"]["reward"]["cider"] == 1


def test_an_unknown_key_after_resume_has_the_nearest_name():
    with pytest.raises(UserError, match=re.escape("trainer.max_epoch: unknown; did you mean max_epochs?")):
        check_resume_overrides(["trainer.max_epoch=3"], SAVED)
    with pytest.raises(UserError, match=re.escape("write +trainer.accelerator=VALUE to add it")):
        check_resume_overrides(["trainer.accelerator=cpu"], SAVED)


plain = st.recursive(
    st.one_of(
        st.text(alphabet="${}\\a.:x '", max_size=8), st.integers(), st.none(), st.booleans(), st.floats(allow_nan=False)
    ),
    lambda child: st.lists(child, max_size=3) | st.dictionaries(st.sampled_from("abc"), child),
    max_leaves=5,
)


@pytest.mark.slow
@given(plain)
@example("$${{")
def test_a_saved_value_comes_back_as_it_was(value):
    assert override({"saved": escape(value), "seed": 1}, ["seed=2"]) == {"saved": value, "seed": 2}


@given(st.text(alphabet=" =,()[]{}'\"#$\\:;~\t\né漢a0", min_size=1, max_size=10))
def test_hydra_writes_a_quoted_path_out_as_it_was(name):
    """As it does for each job of a sweep."""
    parser = OverridesParser.create()
    first = parser.parse_override(quote(f"data.root=/{name}"))
    again = quote(f"data.root={first.get_value_element_as_str()}")
    assert parser.parse_override(again).value() == first.value()
