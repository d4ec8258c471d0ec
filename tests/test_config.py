"""Composing and running, on a small folder of configs of the tests' own."""

import logging
import os
import re
import subprocess
import sys
import tempfile
import textwrap
from pathlib import Path

import pytest
from hydra.core.global_hydra import GlobalHydra
from hydra.core.hydra_config import HydraConfig
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from vlm import config
from vlm.errors import UserError

FILES = {
    "config.yaml": """
        defaults: [_self_, {model: tiny}, {data: shapes}, {optim: adamw}, {task: captioning}, optional experiment: null]
        seed: 0
        name: ${task_name}
    """,
    "model/tiny.yaml": """
        defaults: [{encoder: vit}]
        dim: 8
        twice: ${sum:${model.dim},${model.dim}}
    """,
    "model/encoder/vit.yaml": "depth: 2\nwidth: ${model.dim}",
    "model/encoder/resnet.yaml": "blocks: 3",
    "data/shapes.yaml": "size: 64\nnum_workers: 1\nroot: null",
    "data/captions.yaml": "size: 224\nnum_workers: 4\nroot: ???",
    "data/flickr8k.yaml": "size: 224\nnum_workers: 4\nroot: data/flickr8k",
    "optim/adamw.yaml": "_target_: torch.optim.AdamW\n_partial_: true\nlr: 0.001\nbetas: [0.9, 0.98]",
    "task/captioning.yaml": "# @package _global_\ntask_name: captioning\ntask: {smoothing: 0.0}",
    "experiment/long.yaml": "# @package _global_\nseed: 9",
}


def write(folder, files):
    for name, text in files.items():
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(textwrap.dedent(text), encoding="utf-8")
    return folder


@pytest.fixture(scope="module")
def conf(tmp_path_factory):
    return write(tmp_path_factory.mktemp("conf"), FILES)


@pytest.fixture
def only_a_seed(tmp_path, monkeypatch):
    """A config of one key, for what does not depend on it: composing takes Hydra a while."""
    folder = write(tmp_path / "seed", {"config.yaml": "seed: 0"})
    monkeypatch.setattr(config, "conf_dir", lambda: folder)


@pytest.fixture(autouse=True)
def _in_a_room_of_its_own(conf, tmp_path, monkeypatch):
    monkeypatch.setattr(config, "conf_dir", lambda: conf)
    here = tmp_path / "here"
    here.mkdir()
    monkeypatch.chdir(here)
    monkeypatch.delenv("VLM_DEBUG", raising=False)
    monkeypatch.setattr(sys, "argv", ["train.py"])
    root = logging.getLogger()
    handlers, level = list(root.handlers), root.level
    yield
    root.handlers[:] = handlers
    root.setLevel(level)  # --info speaks through the root logger


def collect(*argv, status=None):
    """The configs that `run` hands to main, and its status."""
    seen = []

    def main(given):
        seen.append(given)
        return status

    return config.run(main, list(argv)), seen


def refused(capsys, *argv, check=None):
    """What `run` prints of a command line that it must refuse without calling main."""
    status = config.run(lambda given: pytest.fail("main was called"), list(argv), check)
    said = capsys.readouterr()
    assert status == 2
    assert said.err.startswith("error: ")
    assert "Traceback" not in said.err
    assert os.listdir() == []
    return said.err.removeprefix("error: ").strip()


def fault(*overrides):
    with pytest.raises(UserError) as caught:
        config.compose(list(overrides))
    assert caught.value.status == 2
    return str(caught.value)


def python(script, also=""):
    """Runs a script in a process of its own, on the same folder of configs."""
    start = "import sys\nfrom pathlib import Path\nfrom vlm import config\n"
    start += f"config.conf_dir = lambda: Path({str(config.conf_dir())!r})\n"
    package = Path(config.__file__).parent.parent
    environment = {**os.environ, "PYTHONPATH": f"{package}{os.pathsep}{also}"}
    command = [sys.executable, "-c", start + textwrap.dedent(script)]
    return subprocess.run(command, capture_output=True, text=True, env=environment)


class TestCompose:
    def test_gives_resolved_plain_containers(self):
        got = config.compose(["seed=3", "model.dim=16"])
        assert got == {
            "seed": 3,
            "name": "captioning",
            "model": {"dim": 16, "twice": 32, "encoder": {"depth": 2, "width": 16}},
            "data": {"size": 64, "num_workers": 1, "root": None},
            "optim": {"_target_": "torch.optim.AdamW", "_partial_": True, "lr": 0.001, "betas": [0.9, 0.98]},
            "task_name": "captioning",
            "task": {"smoothing": 0.0},
        }
        assert type(got["model"]) is dict and type(got["optim"]["betas"]) is list

    def test_options_of_groups_and_of_their_groups(self):
        got = config.compose(["data=flickr8k", "model/encoder=resnet", "experiment=long"])
        assert got["data"]["root"] == "data/flickr8k"
        assert got["model"]["encoder"] == {"blocks": 3}
        assert got["seed"] == 9

    def test_a_missing_value_names_its_key(self):
        with pytest.raises(UserError, match=r"^data\.root: has no value; give data\.root=VALUE$") as caught:
            config.compose(["data=captions"])
        assert caught.value.status == 2

    def test_leaves_no_global_state(self):
        config.compose([])
        with pytest.raises(UserError):
            config.compose(["nonsense=1"])
        assert not GlobalHydra.instance().is_initialized()

    def test_the_shipped_folder_lies_beside_the_package_or_in_it(self, monkeypatch):
        monkeypatch.undo()
        assert config.conf_dir().parent in (Path(config.__file__).parent, Path(config.__file__).parent.parent)
        assert (config.conf_dir() / "config.yaml").is_file()


@pytest.mark.usefixtures("only_a_seed")
class TestStatus:
    @pytest.mark.parametrize(("given", "status"), [(None, 0), (3, 3), (143, 143)])
    def test_is_what_main_returns(self, given, status):
        assert collect(status=given)[0] == status

    def test_of_a_user_error_is_its_own(self, capsys):
        def main(given):
            raise UserError("disk full", 1)

        assert config.run(main, []) == 1
        assert capsys.readouterr().err == "error: disk full\n"

    @pytest.mark.parametrize(("code", "status"), [(None, 0), (5, 5), ("broken", 1)])
    def test_of_an_exit(self, code, status):
        assert config.run(lambda given: sys.exit(code), []) == status

    def test_of_a_bug_is_1_with_a_traceback(self, capsys):
        assert config.run(lambda given: 1 // 0, []) == 1
        assert "ZeroDivisionError" in capsys.readouterr().err

    def test_of_an_interrupt_is_130(self):
        def main(given):
            raise KeyboardInterrupt

        assert config.run(main, ["-m", "seed=1,2"]) == 130

    def test_of_a_sweep_is_the_worst_and_it_goes_on_after_a_fault(self, capsys):
        def main(given):
            if given["seed"] == 2:
                raise UserError("no such folder")
            return given["seed"] == 1

        assert config.run(main, ["-m", "seed=1,2,3"]) == 2
        assert "job 2: seed=3" in capsys.readouterr().err

    def test_of_a_signal_ends_a_sweep(self):
        seen = []

        def main(given):
            seen.append(given["seed"])
            return 143

        assert config.run(main, ["-m", "seed=1,2,3"]) == 143
        assert seen == [1]

    def test_a_fault_shows_its_traceback_to_those_who_ask(self, capsys, monkeypatch):
        monkeypatch.setenv("VLM_DEBUG", "1")
        assert config.run(lambda given: None, ["nonsense=1"]) == 2
        assert "Traceback" in capsys.readouterr().err


class TestHydrasCommandLine:
    @pytest.mark.usefixtures("only_a_seed")
    def test_leaves_nothing_behind(self, tmp_path, monkeypatch):
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

    def test_sweeps_run_every_combination(self):
        status, seen = collect("seed=1,2", "--multirun", "model.dim=8,16", "name='a b'")
        assert status == 0
        assert [(c["seed"], c["model"]["dim"]) for c in seen] == [(1, 8), (1, 16), (2, 8), (2, 16)]
        assert {c["name"] for c in seen} == {"a b"}

    def test_a_sweep_with_a_faulty_value_starts_no_job(self, capsys):
        said = refused(capsys, "-m", "data=shapes,flikr8k")
        assert said == "data=flikr8k: unknown; choose from captions, flickr8k, shapes; did you mean flickr8k?"
        assert refused(capsys, "-m", "seed=1,2", "model.dimm=1,2") == "model.dimm: unknown; did you mean dim?"

    def test_cfg_prints_the_config(self, capsys):
        assert collect("--cfg", "job", "seed=7", "--package", "model")[1] == []
        assert capsys.readouterr().out.startswith("# @package model\nencoder:\n  depth: 2")

    @pytest.mark.parametrize("flags", [["--help"], ["--hydra-help"], ["--info", "searchpath"], ["-i"], ["--version"]])
    def test_information_is_printed(self, capsys, flags):
        status, seen = collect(*flags)
        assert (status, seen) == (0, [])
        assert len(capsys.readouterr().out) > 10

    def test_adds_deletes_and_forces(self):
        got = config.compose(["+model.more={a: 1}", "~task.smoothing", "++seed=4", "++other=5"])
        assert (got["model"]["more"], got["task"], got["seed"], got["other"]) == ({"a": 1}, {}, 4, 5)

    def test_a_users_folder_of_configs(self, tmp_path):
        mine = write(tmp_path / "my configs", {"data/mine.yaml": "size: 5\nroot: x"})
        assert collect("--config-dir", str(mine), "data=mine")[1][0]["data"]["size"] == 5

    def test_a_users_search_path(self, tmp_path):
        mine = write(tmp_path / "mine", {"data/mine.yaml": "size: 5"})
        assert config.compose([f"hydra.searchpath=[file://{mine}]", "data=mine"])["data"]["size"] == 5

    @pytest.mark.usefixtures("only_a_seed")
    def test_main_sees_no_hydra_and_its_own_command(self):
        seen = []

        def main(given):
            seen.append((HydraConfig.initialized(), list(sys.argv)))

        sys.argv = ["vlm", "train", "-m", "seed=1,2"]
        assert config.run(main, ["-m", "seed=1,2"]) == 0
        sys.argv = ["train.py", "seed=4"]
        assert config.run(main, ["seed=4"]) == 0
        assert seen == [
            (False, ["vlm", "train", "seed=1"]),
            (False, ["vlm", "train", "seed=2"]),
            (False, ["train.py", "seed=4"]),
        ]

    @pytest.mark.slow
    def test_a_job_can_be_started_again_by_its_command(self):
        value = "/it's a/\\ b/c=d,(e)"
        commands = []
        config.run(lambda given: commands.append(sys.argv[1:]), ["-m", "seed=1,2", f"data.root={value}"])
        assert [collect(*command)[1][0]["seed"] for command in commands] == [1, 2]
        assert collect(*commands[1])[1][0]["data"]["root"] == value

    @pytest.mark.skipif(not hasattr(os, "fork"), reason="the launcher of this test forks")
    @pytest.mark.usefixtures("only_a_seed")
    def test_another_launchers_jobs_are_not_lost(self, tmp_path):
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
        done = python(f"sys.exit(config.run(lambda given: given['seed'], {argv}))", also=tmp_path)
        assert done.returncode == 3, done.stderr
        assert done.stderr.splitlines()[-1] == "error: job 1 ended with status 3"


class TestFaults:
    @pytest.mark.parametrize(
        ("overrides", "said"),
        [
            (["model.encoder.dpeth=3"], "model.encoder.dpeth: unknown; did you mean depth?"),
            (["modle.dim=3"], "modle: unknown; did you mean model?"),
            (["taks=captioning"], "taks: unknown; did you mean task?"),
            (["lr=0.1"], "lr: unknown; did you mean optim.lr?"),
            (["model/encodr=vit"], "model/encodr: unknown; did you mean model/encoder?"),
            (["optim/lr=1"], "optim/lr: unknown; did you mean optim.lr?"),
            (["data=flikr8k"], "data=flikr8k: unknown; choose from captions, flickr8k, shapes; did you mean flickr8k?"),
            (["data=zzz"], "data=zzz: unknown; choose from captions, flickr8k, shapes"),
            (["experiment=lnog"], "experiment=lnog: unknown; choose from long; did you mean long?"),
            (["model/encoder=vitt"], "model/encoder=vitt: unknown; choose from resnet, vit; did you mean vit?"),
            (
                ["model.encoder=resnet"],
                "model.encoder=resnet: an option is chosen with a slash; write model/encoder=resnet",
            ),
            (["optim.fused=true"], "optim.fused: is not in this config; write +optim.fused=VALUE to add it"),
            (["seed.x=1"], "seed: is 0 and has no x"),
            (["+seed=1"], "seed: is in the config already; leave out the + to change it"),
            (["~optimm"], "optimm: unknown; did you mean optim?"),
            (["seed=1,2"], "seed=1,2: has several values; add -m to run each, or write [...] around them for a list"),
        ],
    )
    def test_in_one_line(self, overrides, said):
        assert fault(*overrides) == said

    @pytest.mark.parametrize(
        ("argv", "said"),
        [
            (["captioning"], "captioning: is not of the form KEY=VALUE, such as trainer.max_epochs=5"),
            (["-cd", "nowhere"], "--config-dir nowhere: no such folder"),
            (["--cfg", "job", "-p", "nothing"], "package 'nothing' not found in config"),
            (["hydra.nothing=1"], "hydra.nothing: unknown to Hydra"),
            (["sede=1"], "sede: unknown; did you mean seed?"),
        ],
    )
    @pytest.mark.usefixtures("only_a_seed")
    def test_of_a_command_line(self, capsys, argv, said):
        assert refused(capsys, *argv) == said

    @pytest.mark.parametrize(
        ("argv", "pattern"),
        [
            (["--epochs", "5"], r"unrecognized arguments: --epochs; values are given as KEY=VALUE"),
            (["--cfg", "jobs"], r"invalid choice: 'jobs'"),
            (["--cfg", "job", "-m"], r"Only one of"),
            (["-cn", "nothing"], r"Cannot find primary config 'nothing'"),
            (["seed=${nothing.here}"], r"^seed: Interpolation key 'nothing.here' not found"),
            (["seed=${oc.env:VLM_TEST_UNSET}"], r"^seed: .*'VLM_TEST_UNSET' not found"),
            (["seed=???"], r"^seed: has no value; give seed=VALUE$"),
        ],
    )
    @pytest.mark.usefixtures("only_a_seed")
    def test_in_short(self, capsys, argv, pattern):
        said = refused(capsys, *argv)
        assert re.search(pattern, said)
        assert len(said.splitlines()) <= 2

    def test_all_at_once(self, capsys):
        def check(given):
            config.check(given, types={"seed": int})

        argv = ["model.encoder.dpeth=3", "data=flikr8k", "seed=abc", "nmae=x", "optim.lr=fast", "data.num_worker=2"]
        assert refused(capsys, *argv, check=check).splitlines() == [
            "data=flikr8k: unknown; choose from captions, flickr8k, shapes; did you mean flickr8k?",
            "model.encoder.dpeth: unknown; did you mean depth?",
            "nmae: unknown; did you mean name?",
            "data.num_worker: unknown; did you mean num_workers?",
            "optim.lr: 'fast' is str, expected float | Tensor",
            "seed: 'abc' is str, expected int",
        ]

    @pytest.mark.parametrize(
        ("text", "pattern"),
        [
            (b"size: 1\nroot: a\nsize: 2\n", r"data/mine\.yaml, line 3: found duplicate key size"),
            (b"size: [1, 2\nroot: x\n", r"data/mine\.yaml, line \d: "),
            (b"size: ${\n", r"size"),
            (b"root: caf\xe9\n", r"data/mine\.yaml: is not UTF-8"),
        ],
    )
    def test_of_a_users_file(self, capsys, tmp_path, text, pattern):
        folder = tmp_path / "mine"
        (folder / "data").mkdir(parents=True)
        (folder / "data/mine.yaml").write_bytes(text)
        said = refused(capsys, "--config-dir", str(folder), "data=mine")
        assert re.search(pattern, said)
        assert len(said.splitlines()) <= 2

    def test_are_found_without_importing_torch(self):
        done = python("""
            status = config.run(lambda given: 0, ["optim.lrr=1", "optim.betas=[1]"], config.check)
            assert "torch" not in sys.modules and "lightning" not in sys.modules
            sys.exit(status)
        """)
        assert done.returncode == 2, done.stderr
        assert done.stderr.splitlines() == [
            "error: optim.lrr: unknown; did you mean lr?",
            "optim.betas: [1] is list, expected tuple[float | Tensor, float | Tensor]",
        ]


odd = st.text(
    alphabet=st.one_of(
        st.sampled_from(" =,()[]{}'\"#$\\:;~!@%^&*|<>?`\t\n-+.é漢😀a0_"),
        st.characters(exclude_categories=["Cs"], exclude_characters="\0"),
    ),
    min_size=1,
    max_size=8,
)


class TestPaths:
    @settings(max_examples=3, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
    @given(st.lists(st.tuples(odd, odd), min_size=20, max_size=20))
    def test_any_path_is_a_value_as_it_stands(self, names):
        paths = [f"/{first}/{second}" for first, second in names]
        paths = [path for path in paths if not re.search(r"\$\{.*\}", path, re.DOTALL)]
        got = config.compose([f"+some.key{index}={path}" for index, path in enumerate(paths)])
        assert list(got.get("some", {}).values()) == paths

    def test_what_exists_is_a_path(self):
        names = [
            "a,b",
            "[1,2]",
            "{a: b}",
            "a b ",
            "x=y",
            "(z)",
            "${seed}",
            "\\${",
            "it's",
            "'q'",
            "#1",
            "é,漢",
            "choice(a)",
        ]
        for name in names:
            Path(name).mkdir()
        status, seen = collect(*(f"+some.key{index}={name}" for index, name in enumerate(names)))
        assert status == 0
        assert list(seen[0]["some"].values()) == names

    def test_what_exists_is_no_sweep(self):
        Path("a,b").mkdir()
        seen = collect("-m", "data.root=a,b", "seed=1,2")[1]
        assert [given["data"]["root"] for given in seen] == ["a,b", "a,b"]

    def test_numbers_stay_numbers_whatever_exists(self):
        Path("1").mkdir()
        Path("null").mkdir()
        Path("shapes").mkdir()
        got = config.compose(["seed=1", "data=shapes", "data.num_workers=1"])
        assert (got["seed"], got["data"]["num_workers"]) == (1, 1)

    def test_a_key_for_a_path_takes_any_name(self):
        names = ["2024", "true", "1e3", "a,b", "a b", "[1]x"]
        got = config.compose([f"+some.key{index}.root={name}" for index, name in enumerate(names)])
        assert [value["root"] for value in got["some"].values()] == names

    def test_interpolations_work_in_paths(self):
        got = config.compose(["data.root=/runs/${name}/a,b", "model.encoder.depth=${model.dim}"])
        assert got["data"]["root"] == "/runs/captioning/a,b"
        assert got["model"]["encoder"]["depth"] == 8

    def test_hydras_own_quotes_and_types_work(self):
        got = collect("data.root='/a b'", "optim.betas=[0.5,0.6]", "task={smoothing: 0.5}", "data.num_workers=null")[1][
            0
        ]
        assert got["data"]["root"] == "/a b"
        assert got["optim"]["betas"] == [0.5, 0.6]
        assert got["task"] == {"smoothing": 0.5}
        assert got["data"]["num_workers"] is None

    def test_paths_can_be_swept_over(self):
        assert [c["data"]["root"] for c in collect("-m", "data.root=/a b,/c")[1]] == ["/a b", "/c"]


class TestOverride:
    def test_sets_values_of_a_saved_config(self):
        saved = config.compose(["name=/literal/x"])
        saved["name"] = "${not.an.interpolation}"
        got = config.override(saved, ["data.root=/a,b", "seed=5"])
        assert (got["data"]["root"], got["seed"], got["name"]) == ("/a,b", 5, "${not.an.interpolation}")
        assert saved["seed"] == 0

    def test_puts_an_option_in_the_place_of_a_group(self):
        saved = config.compose(["model.dim=4"])
        got = config.override(saved, ["data.num_workers=0", "data=captions", "data.root=/x"])
        assert got["data"] == {"size": 224, "num_workers": 0, "root": "/x"}
        assert config.override(saved, ["model/encoder=vit"])["model"]["encoder"] == {"depth": 2, "width": 4}

    @pytest.mark.parametrize(
        ("given", "said"),
        [
            ("data=flikr8k", "did you mean flickr8k"),
            ("experiment=long", "changes the whole config"),
            ("data.rot=1", "data.rot: unknown; did you mean root?"),
            ("seed=1,2", "with one value"),
        ],
    )
    def test_refuses_what_it_cannot_apply(self, given, said):
        with pytest.raises(UserError, match=re.escape(said)):
            config.override(config.compose([]), [given])
