"""Configs of older checkpoints, which were stored resolved with the keys that fed others beside them."""

import copy
import shutil
from pathlib import Path

import pytest
import yaml

from vlm.checkpoint.load import read
from vlm.checkpoint.stored import freeze, restore_interpolations, thaw
from vlm.cli.main import run as vlm
from vlm.config import compose as composing
from vlm.config.compose import override
from vlm.config.tree import resolve, select
from vlm.errors import UserError
from vlm.training.config.nodes import check_effective
from vlm.training.run.evaluate import is_ignored

ROOT = Path(__file__).parents[2]
FILES = [*sorted((ROOT / "tests/checkpoint/files").glob("*.ckpt")), ROOT / "data/sample/captioner.ckpt"]
# Nothing trained the first, and the others are of versions that store references.
FILES = [path for path in FILES if path.stem not in ("embedding", "detection", "text_to_image")]
OLD = {
    "data": {"root": "/old", "path": "/old/x", "max_len": 9, "source": {"root": "/old", "path": "/old/x"}},
    "task": {"max_tokens": 7, "literal": "${data.root}"},
    "fed": {
        "data.root": ["data.source.root", "data.path"],
        "data.path": ["data.source.path"],
        "data.max_len": ["task.max_tokens"],
    },
    "computed": {"data.path": None, "task.max_tokens": ["sum", "data.max_len", -2]},
}


@pytest.fixture(autouse=True)
def _the_shipped_configs(monkeypatch):
    monkeypatch.setattr(composing, "conf_dir", lambda: ROOT / "conf")
    monkeypatch.chdir(ROOT)


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.stem)
def test_an_older_config_resolves_to_itself_and_a_size_follows_an_override(path):
    stored = read(path)["vlm"]["config"]
    saved = thaw(stored)
    plain = {key: value for key, value in stored.items() if key not in ("fed", "computed")}
    assert freeze(dict(saved)) == plain
    changed = override(saved.tree, ["data.max_len=13"] if "max_len" in saved["data"] else ["data.image_size=96"])
    key = "data.max_len" if "max_len" in saved["data"] else "data.image_size"
    places = [place for place in stored["fed"][key] if place not in stored["computed"]]
    assert places and {select(changed, place) for place in places} == {select(changed, key)}
    if "task.max_tokens" in stored["computed"]:
        assert changed["task"]["max_tokens"] == 11


def test_paths_of_an_older_config_follow_an_override():
    tree = restore_interpolations(copy.deepcopy(OLD))
    assert resolve(tree) == {key: value for key, value in OLD.items() if key in ("data", "task")}
    changed = override(tree, ["data.root=/new"])
    assert changed["data"] == {
        "root": "/new",
        "path": "/new/x",
        "max_len": 9,
        "source": {"root": "/new", "path": "/new/x"},
    }
    assert changed["task"]["literal"] == "${data.root}"


def test_an_older_value_that_was_changed_where_it_is_used_keeps_it():
    old = copy.deepcopy(OLD)
    old["data"]["source"]["root"], old["task"]["max_tokens"] = "/mine", 3
    changed = override(restore_interpolations(old), ["data.root=/new", "data.max_len=20"])
    assert (changed["data"]["source"]["root"], changed["task"]["max_tokens"]) == ("/mine", 3)


def test_what_does_not_follow_in_a_config_without_links_is_said():
    old = {key: value for key, value in OLD.items() if key in ("data", "task")}
    saved = resolve(restore_interpolations(old | {"task": {}}))
    with pytest.raises(UserError, match=r"^data\.root: has no effect, because the checkpoint's value is used"):
        check_effective(saved, ["data.root=/new"], is_ignored)


@pytest.mark.parametrize("links", [{"fed": 1}, {"fed": {"data": 1}}, {"fed": {"data.root": ["task"]}, "computed": 1}])
def test_links_of_wrong_kinds_are_refused(links):
    with pytest.raises(UserError, match="not one of vlm"):
        restore_interpolations(copy.deepcopy(OLD) | links)


@pytest.mark.slow
def test_an_older_checkpoint_is_evaluated_on_other_data(tmp_path, capsys):
    (tmp_path / "mine.txt").write_text("a red circle is left of a blue cross.\n" * 50)
    common = ["--device", "cpu", "task.sampled_batches=1", "data.max_len=32"]
    path = shutil.copy(ROOT / "tests/checkpoint/files/language_modeling.ckpt", tmp_path)
    assert vlm(["evaluate", "-c", str(path), "data=text", f"data.path={tmp_path / 'mine.txt'}", *common]) == 0
    assert "bits_per_byte" in capsys.readouterr().out


def test_a_run_of_an_older_version_is_that_of_its_checkpoint(tmp_path):
    from vlm.training.run.run_folder import check_same_run

    stored = read(FILES[0])["vlm"]["config"]
    saved = thaw(stored)
    own = dict(saved) | {key: stored[key] for key in ("fed", "computed")}
    (tmp_path / "config.yaml").write_text(yaml.safe_dump(own))
    check_same_run(tmp_path, saved)
    (tmp_path / "config.yaml").write_text(yaml.safe_dump(own | {"seed": 5}))
    with pytest.raises(UserError, match="seed=5"):
        check_same_run(tmp_path, saved)
