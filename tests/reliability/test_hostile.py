"""Files from strangers, used in a process that is watched: they run, write, read and reach nothing, and are refused.

`hostile_files.py` and `hostile_data.py` make the files, and `hostile_use.py` uses them, all in one process, for a start
costs more than they do.
"""

import json
import os
import subprocess
import sys
from pathlib import Path

import hostile_cases as cases
import hostile_files as files
import pytest

ROOT = Path(__file__).parent.parent.parent
SECONDS = 5
MEGABYTES = 1500  # with torch, Lightning and timm
PERSONAL = {files.SECRET, "HOME", "USER", "LOGNAME", "PATH", "HF_TOKEN", "WANDB_API_KEY", "AWS_SECRET_ACCESS_KEY"}

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def told(tmp_path_factory):
    """What became of each file, by name."""
    folder = tmp_path_factory.mktemp("strangers") / "files"
    folder.mkdir()
    environment = os.environ | {"OMP_NUM_THREADS": "1", "TORCH_FORCE_NO_WEIGHTS_ONLY_LOAD": "1"}
    command = [sys.executable, str(ROOT / "tests/helpers/hostile_use.py"), str(folder)]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=400)
    assert done.returncode == 0, done.stderr[-3000:]
    lines = [json.loads(line) for line in done.stdout.splitlines()]
    found = {line["name"]: line for line in lines if "name" in line}
    return found | {key: line[key] for line in lines if "name" not in line for key in line}


def test_a_good_checkpoint_is_used(told):
    """Without this, all would be refused for a reason that has nothing to do with what is hostile in it."""
    assert (told["good"]["status"], told["good info"]["status"]) == (0, 0)
    assert told["good"]["said"].startswith("image.png\t")


@pytest.mark.parametrize("name", cases.REFUSED)
def test_a_hostile_file_is_refused_and_does_nothing(name, told):
    case = told[name]
    assert case["status"] == (1 if name in cases.FAILING else 2), case["said"]
    assert "error: " in case["said"] and "Traceback" not in case["said"]
    assert len([line for line in case["said"].splitlines() if line.startswith("error: ")]) == 1
    assert case["seen"] == []
    assert not PERSONAL & set(case["read"]) - ({"PATH"} if name in cases.FAILING else set())
    assert case["seconds"] < SECONDS


def test_nothing_is_left_behind(told):
    assert told["canaries"] == []
    assert told["megabytes"] < MEGABYTES


def test_using_a_checkpoint_reads_no_variable_that_a_good_one_does_not(told):
    for name in files.CHECKPOINTS:
        assert set(told[f"caption {name}"]["read"]) <= {*told["good"]["read"], "VLM_DEBUG"}, name


def test_members_of_a_tar_that_lead_out_of_it_are_passed_over_and_the_others_are_read_in_memory(told):
    names = json.loads(told["tar"]["said"])
    assert names == [f"{folder}/{number}.png" for folder in "ab" for number in range(8)]
    assert (told["tar"]["status"], told["tar"]["seen"]) == (0, [])
