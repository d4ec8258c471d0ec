"""Runs of all seeds have the same data, and data.seed gives others."""

from pathlib import Path

import pytest
from PIL import Image

from vlm.config.compose import compose
from vlm.training.config.check import check
from vlm.training.run.build import build_data

ROOT = Path(__file__).parents[2]
SPLITS = ("train", "val", "test")
SIZES = {"captioning": "scenes=6", "classification": "scenes=12", "language_modeling": "documents=3"}
TASKS = {task: [f"data.source.{split}_{size}" for split in SPLITS] for task, size in SIZES.items()}
SHIPPED = sorted(path.stem for path in (ROOT / "conf" / "task").glob("*.yaml"))


def draw_samples(task, tmp_path, *overrides):
    config = compose([f"task={task}", f"runs={tmp_path}", *TASKS[task], *overrides], check)
    data = build_data(config)
    found = {}
    for split in SPLITS:
        for record in data.split(split).records():
            value = record[next(name for name in ("document", "class", "captions") if name in record)]
            value = value.lines() if "document" in record else value
            found[split, record.id] = list(value), record.image().tobytes() if record.open_image else b""
    order = data.train_order() if task != "language_modeling" else ()
    return found, [[key.index for key in batch] for batch in order]


@pytest.mark.sample(slow=2)
@pytest.mark.parametrize("task", TASKS)
def test_another_seed_of_the_run_has_the_same_data_in_another_order_and_one_of_the_data_has_others(task, tmp_path):
    default, order = draw_samples(task, tmp_path)
    other, reordered = draw_samples(task, tmp_path, "seed=1")
    assert other == default and (not order or order != reordered)
    assert draw_samples(task, tmp_path, "data.seed=1")[0] != default


@pytest.mark.sample(slow=2)
@pytest.mark.parametrize("key", ["seed", "data.seed"])
def test_held_out_samples_go_by_the_seed_of_the_data(key, tmp_path):
    for number in range(200):
        Image.new("RGB", (8, 8), (number, 0, 0)).save(tmp_path / f"{number}.png")
    rows = "".join(f"{number}.png,picture {number},train\n" for number in range(200))
    (tmp_path / "table.csv").write_text(f"image,caption,split\n{rows}")
    base = ["data=captions", f"data.root={tmp_path}", "data.path=table.csv", f"runs={tmp_path / 'runs'}"]
    held = []
    for value in (0, 1):
        split = build_data(compose([*base, f"{key}={value}"], check)).split("val")
        held.append([record.id for record in split.records()])
    assert (held[0] == held[1]) == (key == "seed")


@pytest.mark.sample(plain=1, slow=2)
@pytest.mark.parametrize("task", SHIPPED)
def test_the_data_of_every_task_go_by_their_own_seed(task):
    assert compose([f"task={task}", "seed=7", "data.seed=3"])["data"]["source"]["seed"] == 3
