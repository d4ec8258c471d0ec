"""Interpolations: what they resolve to, as OmegaConf has it, and what a file may interpolate."""

import re

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st
from omegaconf import OmegaConf

from vlm.config import compose  # noqa: F401 registers the formulas
from vlm.config.compose import override
from vlm.config.override import resolve_custom_interpolations
from vlm.config.tree import escape, origin, origins, resolve, sources
from vlm.errors import UserError
from vlm.training.config.nodes import check_effective, check_resume_overrides

TREE = {
    "data": {"root": "/old", "path": None, "max_len": 32, "source": {"root": "${data.root}", "path": "${data.path}"}},
    "files": ["${data.root}/a", {"b": "${data.root}"}],
    "task": {"max_tokens": "${sum:${data.max_len},-2}", "label": "of ${data.root}"},
    "model": {"size": {"dim": 8, "heads": 2}, "width": "${model.size.dim}", "position": {"dim": "${model.width}"}},
    "decoder": {"positions": "${model.position}", "head": "${div:${model.size.dim},${model.size.heads}}"},
    "trainer": {"max_epochs": 3},
    "schedule": {"epochs": "${trainer.max_epochs}", "literal": r"\${data.root}", "first": "${files.0}"},
    "deep": "${decoder.positions.dim}",
}


def omegaconf(tree):
    return OmegaConf.to_container(OmegaConf.create(tree), resolve=True)


def test_a_tree_resolves_as_omegaconf_does():
    config = resolve(TREE)
    assert config == omegaconf(TREE)
    assert config.tree is TREE
    assert (config["deep"], config["schedule"]["first"], config["schedule"]["literal"]) == (8, "/old/a", "${data.root}")


@given(
    st.lists(
        st.sampled_from(["\\", "${a}", "${b.c}", "${", "$", "{", "}", "x", "${sum:${b.c},-2}", "${div:7,${b.c}}", " "]),
        max_size=6,
    )
)
def test_strings_resolve_as_omegaconf_has_them(parts):
    assume("$${" not in "".join(parts))  # refused: what it resolves to may look like an interpolation
    tree = {"a": "v", "b": {"c": 3}, "text": "".join(parts)}
    try:
        expected = omegaconf(tree)
    except Exception:
        with pytest.raises(UserError):
            resolve(tree)
    else:
        assert resolve(tree) == expected


@pytest.mark.parametrize(
    "text",
    [
        "${oc.env:HOME}",
        "${oc.decode:'${a}'}",
        "${hydra:runtime.cwd}",
        "${sum:${oc.env:HOME},1}",
        "${${a}}",
        "${a.${b}}",
        "$${a}{oc.env:HOME}",
        r"\${a}${oc.env:HOME}",
        "${.a}",
    ],
)
def test_a_file_interpolates_keys_and_formulas_alone(text):
    with pytest.raises(UserError, match=r"text: .* interpolates more than keys, sum and div"):
        resolve({"a": "b", "b": 1, "text": text})


def test_what_else_is_typed_is_resolved_before_it_is_stored(monkeypatch):
    monkeypatch.setenv("VLM_TEST_PLACE", "/here/${data.root}")
    tree = OmegaConf.create(TREE | {"typed": "${oc.decode:'[1, 2]'}", "near": {"a": 1, "b": "${.a}"}})
    assert resolve_custom_interpolations(tree) == TREE | {"typed": [1, 2], "near": {"a": 1, "b": 1}}
    config = override(TREE, ["data.root=${oc.env:VLM_TEST_PLACE}"])
    assert config["data"]["source"]["root"] == "/here/${data.root}"
    assert resolve(config.tree) == config


@pytest.mark.parametrize(
    ("tree", "said"),
    [
        ({"a": "${b}", "b": "${a}"}, "circular"),
        ({"a": {"b": "${a}"}}, "circular"),
        ({"a": "${a.b}"}, "circular"),
        ({"a": "${b.c}", "b": "${d}", "d": {"e": 1}}, "'d.c' not found"),
        ({"a": "${b}"}, "a: Interpolation key 'b' not found"),
        ({"a": "${b.c}", "b": "x${d}", "d": 1}, "'b.c' not found"),
        ({"a": "???", "b": {"c": "???"}}, "a: has no value; give a=VALUE\nb.c: has no value"),
        ({"a": "${sum:${b},1}", "b": "ten"}, "b: 'ten' is not a number, but a is computed from it"),
        ({"a": "${div:1}"}, "does not take so many terms"),
        ({f"a{n}": f"${{a{n + 1}}}${{a{n + 1}}}" for n in range(40)} | {"a40": "x"}, "expand to too many"),
        ({f"a{n}": [f"${{a{n + 1}}}"] * 2 for n in range(40)} | {"a40": "x"}, "expand to too many"),
    ],
)
def test_what_cannot_be_resolved_is_refused_in_short(tree, said):
    with pytest.raises(UserError, match=re.escape(said)):
        resolve(tree)


@pytest.mark.parametrize(
    ("given", "changed"),
    [
        (["data.path=/new"], {"data.source.path": "/new"}),
        (["data.root=/new"], {"data.source.root": "/new", "task.label": "of /new", "schedule.first": "/new/a"}),
        (["data.root=/new", "data.source.root=/mine"], {"data.source.root": "/mine", "task.label": "of /new"}),
        (["data.max_len=20"], {"task.max_tokens": 18}),
        (["model.size.dim=12"], {"model.width": 12, "decoder.positions.dim": 12, "decoder.head": 6, "deep": 12}),
        (["model.position.dim=5"], {"decoder.positions.dim": 5}),
        (["model.size={dim: 20}"], {"model.width": 20, "decoder.positions.dim": 20, "decoder.head": 10}),
    ],
)
def test_an_override_reaches_what_refers_to_the_key(given, changed):
    got = override(TREE, given)
    for key, value in changed.items():
        assert OmegaConf.select(OmegaConf.create(escape(got)), key) == value
    assert resolve(got.tree) == got


def test_an_interpolated_group_is_changed_where_it_is_set():
    with pytest.raises(UserError, match=r"decoder\.positions\.dim: is interpolated from model\.size\.dim; set that"):
        override(TREE, ["decoder.positions.dim=5"])


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ("data.path=null", "data.path: is None already"),
        ("task.max_tokens=30", "task.max_tokens: is 30 already"),
        ("model.size.heads=4", "model.size.heads: has no effect"),
        ("data.nothing=1", "data.nothing: has no effect"),
    ],
)
def test_an_override_that_changes_nothing_is_refused(given, said):
    before = resolve(TREE | {"data": TREE["data"] | {"nothing": 0}})
    unread = ("model.", "decoder.", "deep", "data.path", "data.nothing")
    with pytest.raises(UserError, match=re.escape(said)):
        check_effective(before, [given], lambda key: key.startswith(unread))


def test_an_override_that_reaches_what_is_read_is_taken():
    before = resolve(TREE)
    for text in ("data.root=/new", "data.max_len=7"):
        check_effective(before, [text], lambda key: key in ("data.root", "data.max_len"))


def test_a_resumed_run_changes_nothing_that_is_made_of_what_may_change():
    with pytest.raises(UserError, match=re.escape("trainer.max_epochs: schedule.epochs depends on it")):
        check_resume_overrides(["trainer.max_epochs=9"], resolve(TREE))
    assert check_resume_overrides(["trainer.max_epochs=3"], resolve(TREE)) == resolve(TREE)


def test_a_value_knows_where_it_comes_from():
    assert origin(TREE, "decoder.positions.dim") == origin(TREE, "deep") == "model.size.dim"
    assert origin(TREE, "task.label") == "task.label"
    assert list(sources(TREE, "task.max_tokens")) == ["task.max_tokens", "data.max_len"]
    assert set(sources(TREE, "files")) == {"files", "data.root"}
    assert list(sources({"a": "${b}", "b": "${a}"}, "a")) == ["a", "b"]


def test_a_fault_is_named_by_the_key_where_the_value_is_set():
    wrong = ["model.width: is wrong", "decoder.positions.dim: is wrong too", "decoder.head: is wrong", "alone"]
    assert origins(TREE, wrong) == ["model.size.dim: is wrong too", "alone"]
    own = ["data.max_len: is wrong", "data.max_len: and more", "model.size.heads: is wrong"]
    assert origins(TREE, [*own, "task.max_tokens: is computed from it"]) == own


def test_a_fault_of_a_value_that_was_overridden_where_it_is_used_is_its_own():
    tree = override(TREE, ["model.width=7"]).tree
    assert origins(tree, ["model.width: is wrong"]) == ["model.width: is wrong"]
