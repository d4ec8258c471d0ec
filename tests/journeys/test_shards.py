"""A data set as shards: written by `vlm shard`, looked over, trained on; the same training as on the files."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from journey import only_run, same_weights

from vlm.checkpoint.stored import freeze, isolate_config, thaw
from vlm.cli.main import run as vlm
from vlm.config.compose import compose
from vlm.config.tree import escape
from vlm.errors import UserError
from vlm.training.run.build import build_data

ROOT = Path(__file__).parents[2]
SIZES = ["data.image_size=48", "data.max_len=24"]


@pytest.fixture(scope="module")
def files(photos: Path) -> list[str]:
    shares = ["data.source.val_fraction=0.2", "data.source.test_fraction=0.2"]
    return ["data=coco", f"data.root={photos}", "data.path=captions.json", *SIZES, *shares]


@pytest.fixture(scope="module")
def shards(files: list[str], tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("shards") / "set"
    assert vlm(["shard", *files, "--out", str(folder), "--shard-size", "7"]) == 0
    return folder


def of(shards: Path | str) -> list[str]:
    return ["data=webdataset", f"data.root={shards}", *SIZES]


@pytest.mark.slow
def test_the_data_are_the_same(files, shards) -> None:
    one, other = (build_data(compose(options)) for options in (files, of(shards)))
    assert one.fingerprint() == other.fingerprint()
    assert sum(map(len, other.splits.values())) == 30 and len(list(shards.glob("train/*.tar"))) > 1
    for name in ("train", "val", "test"):
        a, b = one.split(name), other.split(name)
        assert len(a) == len(b)
        for own, others in zip(a.records(), b.records(), strict=True):
            assert own.id == others.id and own["references"] == others["references"] and own.image() == others.image()


@pytest.mark.slow
def test_every_sample_comes_once_over_ranks_and_workers(shards, tmp_path, monkeypatch) -> None:
    options = ["data.batch_size=8", "data.eval_batch_size=4", "data.num_workers=2", "tokenizer=bytes"]
    data = build_data(compose([*of(shards), *options, f"runs={tmp_path}"]))
    data.prepare()
    seen: dict[str, list[str]] = {"train": [], "eval": []}
    for rank in (0, 1):
        monkeypatch.setattr(data, "_rank_options", lambda rank=rank: {"rank": rank, "world": 2})
        for name, loader in (("train", data.train_dataloader()), ("eval", data.eval_dataloader("train"))):
            seen[name] += [name for batch in loader for name in batch.ids]
    del loader  # and with it its workers, which end slowly where the collector of garbage ends them
    names = [record.id for record in data.split("train").records()]
    assert sorted(seen["train"]) == sorted(seen["eval"]) == sorted(names) and len(set(names)) == len(names)


def test_shards_of_shards_are_the_same_shards(shards, tmp_path, capsys) -> None:
    assert vlm(["shard", *of(shards), "--out", str(tmp_path / "again"), "--shard-size", "7"]) == 0
    assert "train       " in capsys.readouterr().out
    files = sorted(path.relative_to(shards) for path in shards.rglob("*.*"))
    assert all((shards / file).read_bytes() == (tmp_path / "again" / file).read_bytes() for file in files)


@pytest.mark.slow
def test_check_data_compares_checksums(files, tmp_path, capsys) -> None:
    folder = tmp_path / "set"
    assert vlm(["shard", *files, "--out", str(folder)]) == 0
    own = [*of(folder), f"runs={tmp_path}"]
    vlm(["check-data", *own])
    assert "damaged shard" not in capsys.readouterr().out
    path = folder / "train" / "000000.tar"
    data = bytearray(path.read_bytes())
    data[-1] ^= 1  # which no image notices
    path.write_bytes(data)
    assert vlm(["check-data", *own]) == 1
    said = capsys.readouterr().out
    assert "SPOILS      damaged shard: 1 " in said and "000000.tar: does not match its checksum in shards.json" in said
    path.write_bytes(data[:-512])
    assert vlm(["check-data", *own]) == 1  # no other shard has anything to train on
    said = capsys.readouterr().out
    assert "STOPS       " in said and "000000.tar: has " in said and "training    stops: " in said
    with pytest.raises(UserError, match=r"000000\.tar: has .* bytes instead of"):
        build_data(compose(own))


@pytest.mark.slow
def test_shards_of_a_process_that_was_killed_are_not_taken_for_all(files, tmp_path, monkeypatch) -> None:
    def interrupt(*_, **__):
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr("vlm.data.store.shard_sets.build_index", interrupt)
        assert vlm(["shard", *files, "--out", str(tmp_path / "set"), "--shard-size", "7"]) == 130
    assert (tmp_path / "set" / "train" / "000000.tar").is_file()
    with pytest.raises(UserError, match=r"shards\.json: is not a valid manifest .*incomplete"):
        build_data(compose(of(tmp_path / "set")))


@pytest.mark.slow
def test_what_cannot_be_written_is_refused(files, shards, tmp_path, capsys) -> None:
    (tmp_path / "file").write_text("")
    for options, out, said in (
        (files, shards, "is not empty"),
        (["task=language_modeling"], tmp_path / "text", "has no images"),
        (["task=image_questions", "data.source.train_scenes=8"], tmp_path / "questions", "reads questions"),
        (files, tmp_path / "file" / "out", "cannot be written"),
        (files, None, "--out"),
    ):
        assert vlm(["shard", *options, *(["--out", str(out)] if out else [])]) == 2
        assert said in capsys.readouterr().err
    assert not any((tmp_path / "questions").iterdir())


@pytest.mark.slow
def test_a_checkpoints_config_reads_no_url(tmp_path, monkeypatch) -> None:
    for option in (["data=webdataset", "tokenizer=bytes"], ["task=classification", "data=webdataset_classes"]):
        config = compose(option)
        source = isolate_config(config, tmp_path)["data"]["source"]
        assert source["write_index"] is source["remote"] is False
        for key in ("root", "path"):
            config["data"]["source"] |= {"root": str(tmp_path), "path": None, key: "memory://set"}
            assert thaw(freeze(escape(config))) == config  # it may stand in a checkpoint
            with pytest.raises(UserError, match=rf"(?s)data\.{key}=.*VLM_REMOTE=1"):
                build_data(isolate_config(config, tmp_path))
    assert os.listdir(tmp_path) == []
    config["data"]["source"] |= {"root": "memory://set", "path": None}
    monkeypatch.setenv("VLM_REMOTE", "1")
    with pytest.raises(UserError, match=r"set data\.root to the folder of the shards"):  # it was looked for
        build_data(isolate_config(config, tmp_path))


@pytest.mark.slow
def test_a_training_killed_and_resumed_equals_another(small, files, shards, tmp_path) -> None:
    """To the bit: the first run reads files, the second shards, is killed in its second epoch, and goes on."""
    options = [option for option in small if not option.startswith("data.source")]
    options += ["model.size.dropout=0.1", "trainer.max_epochs=4", "data.num_workers=2", "data.augment.min_scale=0.5"]
    options += ["callbacks.checkpoints.every_n_steps=1"]
    command = [sys.executable, str(ROOT / "train.py"), *options]
    for name in ("files", "shards"):
        (tmp_path / name).mkdir()
    whole = subprocess.Popen([*command, *files], cwd=tmp_path / "files", stdout=subprocess.DEVNULL)
    quiet = {"cwd": tmp_path / "shards", "stdout": subprocess.DEVNULL}
    killed = subprocess.Popen([*command, *of(shards)], start_new_session=True, **quiet)
    while not (rows := list((tmp_path / "shards").glob("runs/*/*/metrics.csv"))) or rows[0].read_text().count("\n") < 7:
        assert killed.poll() is None
        time.sleep(0.02)
    os.killpg(killed.pid, signal.SIGKILL)
    assert killed.wait() == -signal.SIGKILL
    subprocess.run([*command[:2], "resume=last"], check=True, **quiet)
    assert whole.wait() == 0
    last = [only_run(tmp_path / name / "runs") / "checkpoints" / "last.ckpt" for name in ("files", "shards")]
    assert same_weights(*last)
