"""Every config that is shipped, and every command of the README."""

import re
import shlex
import shutil
from pathlib import Path

import pytest

from vlm import config as conf
from vlm.cli import run as vlm
from vlm.data.shapes import Shapes
from vlm.training import check, main

ROOT = Path(__file__).parents[2]
TASKS = sorted(path.stem for path in (ROOT / "conf" / "task").glob("*.yaml"))
EXPERIMENTS = sorted(path.stem for path in (ROOT / "conf" / "experiment").glob("*.yaml"))
GROUPS = ["model", "model/encoder", "tokenizer", "optim", "schedule", "trainer", "logger", "callbacks", "data"]
OPTIONS = [f"{group}={path.stem}" for group in GROUPS for path in sorted((ROOT / "conf" / group).glob("*.yaml"))]
README = (ROOT / "README.md").read_text()
COMMANDS = [
    line.removeprefix("$ ")
    for block in re.findall(r"```\n(.*?)```", README, re.DOTALL)
    for line in block.splitlines()
    if re.match(r"(\$ )?(python train\.py|vlm )", line)
]


@pytest.fixture(scope="module")
def flickr8k(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder in Flickr8k's layout, with drawn scenes for photos."""
    folder = tmp_path_factory.mktemp("flickr8k")
    (folder / "images").mkdir()
    source = Shapes(
        seed=0,
        image_size=128,
        shapes=["circle", "cross"],
        colors=["red", "green", "blue", "yellow"],
        sizes=["small", "large"],
        train_scenes=12,
        val_scenes=8,
        test_scenes=8,
        captions_per_image=5,
    )
    lines = []
    for split, name in (("train", "train"), ("val", "dev"), ("test", "test")):
        scenes = source.split(split)
        names = [f"{split}{index}.jpg" for index in range(len(scenes))]
        (folder / f"Flickr_8k.{name}Images.txt").write_text("\n".join(names) + "\n")
        for index, file in enumerate(names):
            scenes.image(0, index).save(folder / "images" / file)
            lines += [f"{file}#{k}\t{caption} ." for k, caption in enumerate(scenes.captions(0, index))]
    (folder / "Flickr8k.token.txt").write_text("\n".join(lines) + "\n")
    return folder


@pytest.mark.parametrize("overrides", [[], *([f"task={task}"] for task in TASKS), *([option] for option in OPTIONS)])
def test_every_option_composes_and_passes_the_check(overrides: list[str], tmp_path: Path) -> None:
    config = conf.compose([*overrides, f"data.root={tmp_path}"] if "data=captions" in overrides else overrides)
    check(config)


@pytest.mark.parametrize("task", TASKS)
def test_an_override_of_a_task_counts(task: str) -> None:
    assert conf.compose([f"task={task}", "optim.lr=0.5", "trainer.max_epochs=3"])["optim"]["lr"] == 0.5


@pytest.mark.parametrize("experiment", EXPERIMENTS)
def test_every_experiment_takes_a_step(experiment: str, flickr8k: Path, tmp_path: Path) -> None:
    said = (ROOT / "conf" / "experiment" / f"{experiment}.yaml").read_text()
    assert f"python train.py experiment={experiment}" in said
    fast = ["debug=fast", "trainer.accelerator=cpu", f"runs={tmp_path}", f"data.root={flickr8k}"]
    assert main([f"experiment={experiment}", *fast]) == 0


def test_the_readme_has_commands() -> None:
    assert len(COMMANDS) >= 7


@pytest.mark.parametrize("command", COMMANDS)
def test_the_readmes_commands_run_as_written(command, trained, photos, flickr8k, read_captions, tmp_path, monkeypatch):
    program, *arguments = shlex.split(command)
    arguments = arguments[1:] if program == "python" else arguments
    run = tmp_path / "runs" / "captioning" / "DATE_TIME"
    shutil.copytree(trained, run)
    shutil.copytree(ROOT / "data" / "sample", tmp_path / "data" / "sample")
    shutil.copytree(photos, tmp_path / "photos")
    shutil.copytree(flickr8k, tmp_path / "data" / "flickr8k")
    table = "".join(f'{name},"{caption}"\n' for name, caption in read_captions(photos / "captions.json"))
    (tmp_path / "photos" / "captions.csv").write_text(f"image,caption\n{table}")
    monkeypatch.chdir(tmp_path)
    wrong = "dpeth" in command
    if program == "vlm":
        assert vlm(arguments) == 0
    elif any(argument.startswith("resume=") for argument in arguments):
        assert main(arguments) == 0
    else:
        small = ["debug=fast", "trainer.accelerator=cpu", "model.size.dim=32", "model.size.num_heads=2"]
        assert main([*arguments, *small]) == (2 if wrong else 0)
