"""Hydra's command line, and the statuses that a run may end with."""

import logging
import os
import sys
import tempfile

import pytest
from hydra.core.hydra_config import HydraConfig

from vlm.config import command
from vlm.config.compose import compose
from vlm.errors import UserError


@pytest.mark.usefixtures("only_a_seed")
class TestStatus:
    @pytest.mark.parametrize(("given", "status"), [(None, 0), (3, 3), (143, 143)])
    def test_is_what_main_returns(self, given, status, collect):
        assert collect(status=given)[0] == status

    def test_of_a_user_error_is_its_own(self, capsys):
        def main(given):
            raise UserError("disk full", 1)

        assert command.run(main, []) == 1
        assert capsys.readouterr().err == "error: disk full\n"

    @pytest.mark.parametrize(("code", "status"), [(None, 0), (5, 5), ("broken", 1)])
    def test_of_an_exit(self, code, status):
        assert command.run(lambda given: sys.exit(code), []) == status

    def test_of_a_bug_is_1_with_a_traceback(self, capsys):
        assert command.run(lambda given: 1 // 0, []) == 1
        assert "ZeroDivisionError" in capsys.readouterr().err

    @pytest.mark.slow
    def test_of_an_interrupt_is_130(self):
        def main(given):
            raise KeyboardInterrupt

        assert command.run(main, ["-m", "seed=1,2"]) == 130

    @pytest.mark.slow
    def test_of_a_sweep_is_the_worst_and_it_goes_on_after_a_fault(self, capsys):
        def main(given):
            if given["seed"] == 2:
                raise UserError("no such folder")
            return given["seed"] == 1

        assert command.run(main, ["-m", "seed=1,2,3"]) == 2
        assert "job 2: seed=3" in capsys.readouterr().err

    @pytest.mark.slow
    def test_of_a_signal_ends_a_sweep(self):
        seen = []

        def main(given):
            seen.append(given["seed"])
            return 143

        assert command.run(main, ["-m", "seed=1,2,3"]) == 143
        assert seen == [1]

    def test_a_fault_shows_its_traceback_to_those_who_ask(self, capsys, monkeypatch):
        monkeypatch.setenv("VLM_DEBUG", "1")
        assert command.run(lambda given: None, ["nonsense=1"]) == 2
        assert "Traceback" in capsys.readouterr().err


class TestHydrasCommandLine:
    @pytest.mark.slow
    @pytest.mark.usefixtures("only_a_seed")
    def test_leaves_nothing_behind(self, tmp_path, monkeypatch, collect):
        monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "temporary"))
        (tmp_path / "temporary").mkdir()
        handlers = list(logging.getLogger().handlers)
        environment = dict(os.environ)
        assert collect()[0] == 0
        assert collect("-m", "seed=1,2")[0] == 0
        assert os.listdir() == []
        assert os.listdir(tmp_path / "temporary") == []
        assert logging.getLogger().handlers == handlers
        assert dict(os.environ) == environment
        assert sys.argv == ["train.py"]

    @pytest.mark.slow
    def test_sweeps_run_every_combination(self, collect):
        status, seen = collect("seed=1,2", "--multirun", "model.dim=8,16", "name='a b'")
        assert status == 0
        assert [(c["seed"], c["model"]["dim"]) for c in seen] == [(1, 8), (1, 16), (2, 8), (2, 16)]
        assert {c["name"] for c in seen} == {"a b"}

    @pytest.mark.slow
    @pytest.mark.parametrize("stop", [1, 2, 4])
    def test_a_signal_ends_a_sweep_that_names_the_jobs_left(self, stop):
        ran, told = [], []

        def job(resolve, overrides, record, learns):
            ran.append(overrides)
            record.write_text("{}")
            return 130 if len(ran) == stop else 0

        def closing(records, left, study):
            assert study is None
            told.append(left)
            return ""

        own = command.Sweep(job, closing, lambda record: None, lambda *given: [])
        swept = ["-m", "seed=1,2", "model.dim=8,16", "name='a b'"]
        assert command.run(lambda config: 0, swept, sweep=own) == 130
        jobs = [[f"seed={seed}", f"model.dim={dim}", "name='a b'"] for seed in (1, 2) for dim in (8, 16)]
        assert told == [jobs[stop - 1 :]] and len(ran) == stop

    def test_a_sweep_with_a_faulty_value_starts_no_job(self, refused):
        said = refused("-m", "data=shapes,flikr8k")
        assert said == "data=flikr8k: unknown; choose from captions, flickr8k, shapes; did you mean flickr8k?"
        assert refused("-m", "seed=1,2", "model.dimm=1,2") == "model.dimm: unknown; did you mean dim?"

    def test_cfg_prints_the_config(self, capsys, collect):
        assert collect("--cfg", "job", "seed=7", "--package", "model")[1] == []
        assert capsys.readouterr().out.startswith("# @package model\nencoder:\n  depth: 2")

    @pytest.mark.slow
    @pytest.mark.parametrize("flags", [["--help"], ["--hydra-help"], ["--info", "searchpath"], ["-i"], ["--version"]])
    def test_information_is_printed(self, capsys, flags, collect):
        status, seen = collect(*flags)
        assert (status, seen) == (0, [])
        printed = capsys.readouterr().out
        assert len(printed) > 10 and ("resume=RUN" in printed or flags != ["--help"])

    def test_adds_deletes_and_forces(self):
        got = compose(["+model.more={a: 1}", "~task.smoothing", "++seed=4", "++other=5"])
        assert (got["model"]["more"], got["task"], got["seed"], got["other"]) == ({"a": 1}, {}, 4, 5)

    @pytest.mark.slow
    def test_a_users_folder_of_configs(self, tmp_path, collect, write):
        mine = write(tmp_path / "my configs", {"data/mine.yaml": "size: 5\nroot: x"})
        assert collect("--config-dir", str(mine), "data=mine")[1][0]["data"]["size"] == 5

    @pytest.mark.slow
    def test_a_users_search_path(self, tmp_path, write):
        mine = write(tmp_path / "mine", {"data/mine.yaml": "size: 5"})
        assert compose([f"hydra.searchpath=[file://{mine}]", "data=mine"])["data"]["size"] == 5

    @pytest.mark.slow
    @pytest.mark.usefixtures("only_a_seed")
    def test_main_sees_no_hydra_and_its_own_command(self):
        seen = []

        def main(given):
            seen.append((HydraConfig.initialized(), list(sys.argv)))

        sys.argv = ["train.py", "seed=4"]
        assert command.run(main, ["seed=4"]) == 0
        sys.argv = ["train.py", "hydra.verbose=false", "seed=5"]
        assert command.run(main, sys.argv[1:]) == 0
        sys.argv = ["vlm", "train", "-m", "seed=1,2"]
        assert command.run(main, ["-m", "seed=1,2"]) == 0
        assert seen == [
            (False, ["train.py", "seed=4"]),
            (False, ["train.py", "hydra.verbose=false", "seed=5"]),
            (False, ["vlm", "train", "seed=1"]),
            (False, ["vlm", "train", "seed=2"]),
        ]

    @pytest.mark.slow
    def test_a_job_can_be_started_again_by_its_command(self, collect):
        value = "/it's a/\\ b/c=d,(e)"
        commands = []
        command.run(lambda given: commands.append(sys.argv[1:]), ["-m", "seed=1,2", f"data.root={value}"])
        assert [collect(*command)[1][0]["seed"] for command in commands] == [1, 2]
        assert collect(*commands[1])[1][0]["data"]["root"] == value

    @pytest.mark.slow
    @pytest.mark.skipif(not hasattr(os, "fork"), reason="the launcher of this test forks")
    @pytest.mark.usefixtures("only_a_seed")
    def test_another_launchers_jobs_are_not_lost(self, tmp_path, python, write):
        """Those of joblib or submitit run in processes of their own."""
        launcher = """
            import multiprocessing, os
            from hydra._internal.core_plugins.basic_launcher import BasicLauncher
            from hydra.core.config_store import ConfigStore

            class Forking(BasicLauncher):
                def launch(self, job_overrides, initial_job_idx):
                    receive, send = multiprocessing.Pipe()
                    if (child := os.fork()) == 0:
                        send.send(super().launch(job_overrides, initial_job_idx))
                        os._exit(0)
                    jobs = receive.recv()
                    os.waitpid(child, 0)
                    return jobs

            node = {"_target_": "hydra_plugins.forking.Forking"}
            ConfigStore.instance().store(group="hydra/launcher", name="forking", node=node)
        """
        write(tmp_path, {"hydra_plugins/forking/__init__.py": launcher})
        argv = ["-m", "seed=0,3", "hydra/launcher=forking"]
        done = python(f"sys.exit(command.run(lambda given: given['seed'], {argv}))", also=tmp_path)
        assert done.returncode == 3, done.stderr
        assert done.stderr.splitlines()[-1] == "error: job 1 exited with status 3"
