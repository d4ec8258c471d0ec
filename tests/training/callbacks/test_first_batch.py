"""The header of a training."""

from types import SimpleNamespace

import torch

from vlm.training.callbacks.progress import format_header
from vlm.training.run.train import format_score_table


def test_the_header_names_device_precision_data_and_folder():
    data = SimpleNamespace(splits={"train": range(4000), "val": range(50)})
    trainer = SimpleNamespace(datamodule=data, strategy=SimpleNamespace(root_device=torch.device("cpu")))
    trainer.__dict__.update(world_size=2, precision="bf16-mixed", default_root_dir="runs/mine/now")
    lines = format_header(trainer)
    assert [line.split(maxsplit=1) for line in lines] == [
        ["run", "runs/mine/now"],
        ["device", "2 x cpu, bf16-mixed"],
        ["data", "train 4,000, val 50"],
    ]


def test_a_table_fits_80_columns():
    names = ["loss", "loss@low", "loss@high", "loss@constant", "loss@shuffled", "loss@blank", "length_ratio"]
    lines = format_score_table({f"test/{name}": 1.0 for name in names}).splitlines()
    assert max(map(len, lines)) <= 80
