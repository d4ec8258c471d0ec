"""Jobs of a sweep: their folders, their results, and the table of results."""

import json
import re
from pathlib import Path

import pytest

from vlm.cli.main import run as vlm
from vlm.config.command import StoppedStudy
from vlm.training.run.fit import main
from vlm.training.run.sweep import folder_suffix, format_results

QUICK = ["debug=fast", "trainer=cpu", "callbacks.progress=null", "model.size.dim=32", "model.size.num_heads=2"]
QUICK += [f"data.source.{split}_scenes={count}" for split, count in (("train", 16), ("val", 8), ("test", 8))]


def record(place: Path, number: int, **row: object) -> Path:
    path = place / f"job-{number}.json"
    path.write_text(json.dumps(row))
    return path


class TestLabel:
    def test_is_the_overrides_without_signs_of_a_shell(self):
        assert folder_suffix(["optim.lr=0.1", "seed=2"]) == "optim.lr=0.1_seed=2"
        assert folder_suffix(["data.root='/a b/../$(c);*'", "data.colors=[red,blå]"]) == (
            "data.root=-a-b-..-c-_data.colors=-red,bl-"
        )

    def test_fits_into_a_name(self):
        assert len(folder_suffix([f"task.word={'x' * 300}"])) == 120


class TestClosing:
    def test_stands_the_best_first_and_the_failed_last(self, tmp_path):
        rows = [
            {"overrides": "lr=1", "error": "lr: too much\x1b[1m"},
            {"overrides": "lr=2", "folder": "b", "metric": "val/loss", "score": 2.0, "lower_is_better": True},
            {"overrides": "lr=3", "folder": "c", "metric": "val/loss", "score": 1.0, "lower_is_better": True},
            {"overrides": "lr=4", "folder": "d", "metric": "val/loss", "score": float("nan"), "lower_is_better": True},
            {"overrides": "lr=5", "folder": "e"},
        ]
        text = format_results([record(tmp_path, number, **row) for number, row in enumerate(rows)])
        assert text.splitlines() == [
            "",
            "5 sweep jobs, best first",
            "overrides            score  run",
            "lr=3       val/loss 1.0000  c",
            "lr=2       val/loss 2.0000  b",
            "lr=4          val/loss nan  d",
            "lr=5                  none  e",
            "lr=1                failed  lr: too much\\x1b[1m",
        ]

    def test_of_a_score_that_rises(self, tmp_path):
        row = {"metric": "test/cider", "lower_is_better": False}
        rows = [row | {"overrides": f"seed={n}", "folder": f"{n}", "score": n / 4} for n in range(3)]
        text = format_results([record(tmp_path, number, **row) for number, row in enumerate(rows)])
        assert [line.split()[0] for line in text.splitlines()[3:6]] == ["seed=2", "seed=1", "seed=0"]
        assert "use test=false to rank by validation" in text

    def test_says_how_a_stopped_sweep_goes_on(self, tmp_path, monkeypatch):
        monkeypatch.setattr("sys.argv", ["vlm"])
        row = record(tmp_path, 0, overrides="seed=1", interrupted=True, folder=str(tmp_path / "run"))
        left = [["seed=1", "name='a b'"], ["seed=2", "name='a b'"], ["seed=3", "name='a b'"]]
        commands = [f"""  vlm train seed={n} 'name='"'"'a b'"'"''""" for n in (1, 2, 3)]
        lines = format_results([row], left).splitlines()
        assert lines[-4:] == ["stopped: 2 jobs did not run. Continue with:", *commands]
        (tmp_path / "run" / "checkpoints").mkdir(parents=True)
        (tmp_path / "run" / "checkpoints" / "last.ckpt").touch()
        resumed = f"  vlm train resume={tmp_path / 'run'}"
        assert format_results([row], left).splitlines()[-3:] == [resumed, *commands[1:]]
        assert format_results([row], [["seed=1"]] * 30).splitlines()[-1] == "  ... and 10 more"
        assert f"seed=1     stopped  {tmp_path / 'run'}" in format_results([row], left)
        ended = record(tmp_path, 1, overrides="seed=0", folder=str(tmp_path / "run"))  # the signal came between jobs
        lines = format_results([ended], left).splitlines()
        assert lines[-4:] == ["stopped: 3 jobs did not run. Continue with:", *commands]

    def test_says_how_many_trials_of_a_stopped_study_are_left_and_how_it_continues(self, tmp_path, monkeypatch):
        monkeypatch.setattr("sys.argv", ["vlm"])
        run = tmp_path / "run"
        row = record(tmp_path, 0, overrides="seed=1", interrupted=True, folder=str(run))
        line = ["-m", "hydra/sweeper=optuna", "seed=range(1,9)"]
        study = StoppedStudy(line, trials=8, remaining=5, is_stored=True)
        said = format_results([row], study=study).splitlines()[-2:]
        assert said[0].startswith("stopped: 5 of 8 trials remain. Continue with the same command, which replaces")
        assert said[1] == "  vlm train -m hydra/sweeper=optuna 'seed=range(1,9)'"
        (run / "checkpoints").mkdir(parents=True)
        (run / "checkpoints" / "last.ckpt").touch()
        said = format_results([row], study=study._replace(is_stored=False)).splitlines()[-4:]
        assert said[0].startswith("stopped: 5 of 8 trials remain. The study is not stored and cannot be continued")
        assert said[1].endswith(" hydra.sweeper.study_name=NAME hydra.sweeper.storage=sqlite:///FILE.db")
        assert said[3] == f"  vlm train resume={run}"


@pytest.mark.slow
class TestSweep:
    def test_names_its_runs_and_ends_with_their_scores(self, tmp_path, capsys):
        swept = ["seed=1,2", "model.encoder.depth=1,0"]
        assert main(["-m", *QUICK, *swept, f"runs={tmp_path}"]) == 2
        folders = sorted((tmp_path / "captioning").iterdir())
        assert [folder.name[20:] for folder in folders] == [f"seed={n}_model.encoder.depth=1" for n in (1, 2)]
        printed = capsys.readouterr().out
        assert "run         " in printed
        table = printed[printed.index("4 sweep jobs") :].splitlines()[2:6]
        scores = {folder: json.loads((folder / "evaluation/test/metrics.json").read_text()) for folder in folders}
        best = sorted(folders, key=lambda folder: -scores[folder]["test/cider"])
        for line, folder in zip(table, best, strict=False):
            overrides = folder.name[20:].replace("_model", " model")
            assert line.split("  ")[0] == overrides
            assert f"test/cider {scores[folder]['test/cider']:.4f}  {folder}" in line
        assert main([f"resume={folders[0]}", "trainer.max_epochs=2"]) == 0  # = in a path is no override
        assert all("failed" in line and "depth" in line for line in table[2:])

    def test_that_tests_nothing_ranks_by_validation(self, tmp_path, capsys):
        swept = [f"callbacks.checkpoints.{one}" for one in ("monitor=val/loss", "mode=min")]
        swept += ["test=false", "optim.lr=1e-3,1e-30"]
        assert main(["-m", *QUICK, *swept, f"runs={tmp_path}"]) == 0
        table = capsys.readouterr().out.partition("2 sweep jobs")[2].splitlines()[2:]
        assert [line.split()[:2] for line in table] == [["optim.lr=0.001", "val/loss"], ["optim.lr=1e-30", "val/loss"]]
        assert float(table[0].split()[2]) < float(table[1].split()[2])
        folders = sorted(map(str, (tmp_path / "captioning").iterdir()))
        assert vlm(["compare", *folders]) == 0
        said = capsys.readouterr()
        assert re.search(r"loss +\d\.\d+ +\d\.\d+", said.out) and "*" not in said.out
        names = ", ".join(Path(folder).name for folder in folders)
        compared = "their validation scores are compared, without intervals"
        assert said.err.startswith(f"warning: not tested: {names}; {compared}")
        assert said.err.count("warning: ") == 1
        assert f"vlm evaluate -c {folders[0]}/checkpoints/best.ckpt --split val --out DIR" in said.err
        tested = tmp_path / "tested"
        assert vlm(["evaluate", "-c", folders[0], "--split", "test", "--out", str(tested), "--device", "cpu"]) == 0
        assert vlm(["compare", folders[0], str(tested)]) == 1
        assert "of val, and" in capsys.readouterr().err
