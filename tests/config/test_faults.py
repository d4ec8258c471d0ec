"""What is said of configs and command lines that are at fault."""

import re

import pytest

from vlm.config.build import check


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
            (["data=null"], "data=null: is not an option; choose from captions, flickr8k, shapes"),
            (["data=[1]"], "data=[1]: is not an option; choose from captions, flickr8k, shapes"),
            (["optim=[adamw,1]"], "optim=[adamw,1]: is not an option; choose from adamw"),
            (["model.encoder=[1]"], "model.encoder: is a group of keys and cannot be set to a list; set its keys"),
            (["data=zzz"], "data=zzz: unknown; choose from captions, flickr8k, shapes"),
            (["experiment=lnog"], "experiment=lnog: unknown; choose from long; did you mean long?"),
            (["model/encoder=vitt"], "model/encoder=vitt: unknown; choose from resnet, vit; did you mean vit?"),
            (
                ["model.encoder=resnet"],
                "model.encoder=resnet: the group of an option has slashes; write model/encoder=resnet",
            ),
            (["optim.fused=true"], "optim.fused: is not in this config; write +optim.fused=VALUE to add it"),
            (["seed.x=1"], "seed: is 0 and has no x"),
            (["optim.lr=1", "optim.lr.x=2"], "optim.lr: is 1 and has no x"),
            (["+seed=1"], "seed: is already in the config; leave out the + to change it"),
            (["~optimm"], "optimm: unknown; did you mean optim?"),
            (["seed=1,2"], "seed=1,2: has several values; add -m to run each of them, or write [...] for a list"),
        ],
    )
    def test_in_one_line(self, overrides, said, fault):
        assert fault(*overrides) == said

    @pytest.mark.parametrize(
        ("argv", "pattern"),
        [
            (["="], "^=: is not of the form KEY=VALUE, such as trainer.max_epochs=5$"),
            (["=1"], "^=1: is not of the form KEY=VALUE, such as trainer.max_epochs=5$"),
            (["captioning"], "^captioning: is not of the form KEY=VALUE, such as trainer.max_epochs=5$"),
            (["--epochs", "5"], "unrecognized arguments: --epochs; use the form KEY=VALUE"),
            (["-cd", "nowhere"], "^--config-dir nowhere: no such folder$"),
            (["-cn", "nothing"], "Cannot find primary config 'nothing'"),
            (["--cfg", "job", "-p", "nothing"], "^package 'nothing' not found in config$"),
            (["--cfg", "jobs"], "invalid choice: 'jobs'"),
            (["--cfg", "job", "-m"], "Only one of"),
            (["hydra.nothing=1"], "^hydra.nothing: unknown to Hydra$"),
            (["sede=1"], r"^sede: unknown; did you mean seed\?$"),
            (["seed=${nothing.here}"], "^seed: Interpolation key 'nothing.here' not found"),
            (["seed=${oc.env:VLM_TEST_UNSET}"], "^seed: .*'VLM_TEST_UNSET' not found"),
            (["seed=???"], "^seed: has no value; give seed=VALUE$"),
        ],
    )
    @pytest.mark.usefixtures("only_a_seed")
    def test_of_a_command_line(self, argv, pattern, refused):
        said = refused(*argv)
        assert re.search(pattern, said)
        assert len(said.splitlines()) <= 2

    def test_all_at_once(self, refused):
        def with_types(given, imports):
            check(given, types={"seed": int})

        argv = ["model.encoder.dpeth=3", "data=flikr8k", "seed=abc", "nmae=x", "optim.lr=fast", "data.num_worker=2"]
        assert refused(*argv, check=with_types).splitlines() == [
            "data=flikr8k: unknown; choose from captions, flickr8k, shapes; did you mean flickr8k?",
            "model.encoder.dpeth: unknown; did you mean depth?",
            "nmae: unknown; did you mean name?",
            "data.num_worker: unknown; did you mean num_workers?",
            "optim.lr: 'fast' is str, expected float",
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
    def test_of_a_users_file(self, tmp_path, text, pattern, refused):
        folder = tmp_path / "mine"
        (folder / "data").mkdir(parents=True)
        (folder / "data/mine.yaml").write_bytes(text)
        said = refused("--config-dir", str(folder), "data=mine")
        assert re.search(pattern, said)
        assert len(said.splitlines()) <= 2
