"""Optuna studies: the objective, a study that continues after a kill, and the table that agrees with it."""

import csv
import json
import os
import re
import shlex
import signal
import subprocess
import sys
import time
from importlib.util import find_spec
from pathlib import Path

import pytest

from vlm.errors import UserError
from vlm.training.run.fit import main
from vlm.training.run.sweep import begin_study, read_objective

ROOT = Path(__file__).parents[3]
PLUGIN = find_spec("hydra_plugins") and find_spec("hydra_plugins.hydra_optuna_sweeper")
SWEEPER = {"direction": "minimize", "storage": None, "study_name": None, "n_trials": 8, "n_jobs": 2, "sampler": {}}
QUICK = ["task=language_modeling", "debug=fast", "trainer=cpu", "callbacks.progress=null", "callbacks.audit=null"]
QUICK += ["test=false", "model.size.dim=32", "model.size.num_heads=2", "data.source.train_documents=20"]
STUDY = ["-m", "hydra/sweeper=optuna", "optim.lr=tag(log,interval(1e-4,1e-1))", "model.size.depth=choice(1,2)", *QUICK]
STUDY += ["hydra.sweeper.n_trials=4", "hydra.sweeper.study_name=lr", "hydra.sweeper.sampler.seed=0"]


def begin(tmp_path, monitor="val/cider", mode="max", typed=(), **sweeper):
    config = {"callbacks": {"checkpoints": {"monitor": monitor, "mode": mode}}, "runs": str(tmp_path), "name": "a"}
    return begin_study(SWEEPER | sweeper, config, [f"hydra.sweeper.{key}" for key in typed], tmp_path)


class TestBegin:
    def test_gives_the_direction_of_the_metric_that_chooses_checkpoints(self, tmp_path, capsys):
        assert begin(tmp_path) == ["hydra.sweeper.direction=maximize", "hydra.sweeper.n_jobs=1"]
        assert capsys.readouterr().err == "Optuna optimizes val/cider (maximize)\n"
        assert begin(tmp_path, "val/loss", "min", ["n_jobs", "direction"]) == ["hydra.sweeper.direction=minimize"]

    @pytest.mark.parametrize(
        ("said", "given"),
        [
            ("hydra.sweeper.direction: val/cider must be maximized", {"typed": ["direction"]}),
            ("callbacks.checkpoints.monitor: set it to the metric", {"monitor": None}),
        ],
    )
    def test_refuses(self, said, given, tmp_path):
        with pytest.raises(UserError, match=said):
            begin(tmp_path, **given)

    @pytest.mark.skipif(bool(PLUGIN), reason="the plugin is there")
    def test_without_the_plugin_names_the_extra(self, capsys):
        assert main(["-m", "hydra/sweeper=optuna", "seed=1,2"]) == 2
        assert 'needs a plugin of Hydra; pip install "vlm-lightning[optuna]"' in capsys.readouterr().err


def test_a_score_that_is_not_finite_is_no_objective(tmp_path):
    for row, score in (({"score": 0.5}, 0.5), ({"score": float("nan")}, None), ({"error": "no"}, None)):
        (tmp_path / "job.json").write_text(json.dumps({"overrides": ""} | row))
        assert read_objective(tmp_path / "job.json") == score


def read_ranking(table: str) -> list[tuple[str, str]]:
    """Values and scores of the trials in a table of results, as printed."""
    rows = table.partition("best first")[2].splitlines()[2:]
    return re.findall(r"^optim.lr=(\S+).*?  +(?:val/loss )?(\S+)  ", "\n".join(rows), re.MULTILINE)


@pytest.mark.slow
@pytest.mark.skipif(not PLUGIN, reason="needs hydra-optuna-sweeper")
class TestStudy:
    def test_goes_on_after_a_kill_and_agrees_with_the_table(self, tmp_path, capsys):
        import optuna

        storage = f"sqlite:///{tmp_path}/study.db"
        line = [*STUDY, f"hydra.sweeper.storage={storage}", f"runs={tmp_path}/runs"]
        pipes: dict = {"stderr": subprocess.PIPE, "stdout": subprocess.DEVNULL, "text": True}
        process = subprocess.Popen([sys.executable, "train.py", *line], cwd=ROOT, **pipes)
        while "job 1:" not in process.stderr.readline():
            assert process.poll() is None
        os.kill(process.pid, signal.SIGKILL)
        process.wait(), process.stderr.close()
        assert main(line) == 0
        printed = capsys.readouterr()
        assert "Optuna optimizes val/loss (minimize)\nstudy lr: 1 of 4 trials finished" in printed.err
        trials = optuna.load_study(study_name="lr", storage=storage).trials
        assert [trial.state.name for trial in trials] == ["COMPLETE", "RUNNING", *["COMPLETE"] * 3]
        assert len({trial.params["optim.lr"] for trial in trials}) == 5  # a seed does not draw the same again
        done = sorted((trial for trial in trials if trial.value is not None), key=lambda trial: trial.value)
        assert read_ranking(printed.out) == [
            *((str(trial.params["optim.lr"]), f"{trial.value:.4f}") for trial in done),
            (str(trials[1].params["optim.lr"]), "stopped"),
        ]
        for trial in done:  # as its run wrote it
            (folder,) = (tmp_path / "runs/language_modeling").glob(f"*_optim.lr={trial.params['optim.lr']}_*")
            rows = csv.DictReader((folder / "metrics.csv").open())
            losses = [float(row["val/loss"]) for row in rows if row["val/loss"]]
            assert min(losses) == pytest.approx(trial.value, rel=1e-5) and str(folder) in printed.out
        assert main([*line, "task.label_smoothing=0.1"]) == 0 and "4 of 4 trials finished" in capsys.readouterr().err
        assert main([*line, "callbacks.checkpoints.monitor=val/bits_per_byte"]) == 2
        assert "study lr optimizes val/loss (minimize), not val/bits_per_byte" in capsys.readouterr().err
        assert main([*line, f"hydra.sweeper.storage=sqlite:///{tmp_path}/no/study.db"]) == 2
        assert "error: hydra.sweeper.storage: sqlite:" in capsys.readouterr().err

    @pytest.mark.nightly  # the test above goes on after SIGKILL; test_resume.py tells of a signal
    def test_stopped_by_a_signal_says_what_is_left_and_continues(self, tmp_path, capsys):
        line = [*STUDY, f"hydra.sweeper.storage=sqlite:///{tmp_path}/study.db", f"runs={tmp_path}/runs"]
        pipes: dict = {"stderr": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
        process = subprocess.Popen([sys.executable, "train.py", *line], cwd=ROOT, **pipes)
        while "job 1:" not in process.stderr.readline():
            assert process.poll() is None
        while len(list((tmp_path / "runs/language_modeling").iterdir())) < 2:  # the folder of the second run
            time.sleep(0.05)
        os.kill(process.pid, signal.SIGINT)
        printed = process.communicate()[0]
        assert process.returncode == 130 and "stopped: 3 of 4 trials remain. Continue with the same command" in printed
        assert [score for _, score in read_ranking(printed)][-1] == "stopped" and "status 130" not in printed
        command = next(text for text in printed.splitlines() if "train.py --multirun hydra/sweeper=optuna" in text)
        assert main(shlex.split(command.partition("train.py ")[2])) == 0
        assert "study lr: 1 of 4 trials finished" in capsys.readouterr().err

    def test_is_not_told_of_a_trial_that_failed_and_goes_on(self, capsys, tmp_path):
        line = [*STUDY, "model.size.depth=choice(0)", "hydra.sweeper.n_trials=2", f"runs={tmp_path}"]
        assert main(line) == 2
        printed = capsys.readouterr()
        assert [score for _, score in read_ranking(printed.out)] == ["failed"] * 2
        errors = [text for text in printed.err.splitlines() if text.startswith("error: ")]
        assert len(errors) == 2 and all("model.size.depth: 0" in text for text in errors)  # none of optuna's own
