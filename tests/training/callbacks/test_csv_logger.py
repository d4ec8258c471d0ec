import csv

import pytest

from vlm.training.callbacks.loggers import CSVLogger


def rows(folder):
    with (folder / "metrics.csv").open(newline="") as file:
        return list(csv.DictReader(file))


def log(folder, *entries):
    logger = CSVLogger(folder=str(folder))
    for step, metrics in entries:
        logger.log_metrics(metrics, step)
        logger.save()
    logger.finalize("success")


def test_a_row_a_step_and_a_column_a_metric(tmp_path):
    log(tmp_path, (9, {"train/loss": 2.5}), (19, {"train/loss": 1.5}), (19, {"val/loss": 1.75}), (29, {"lr": 0.1}))
    assert rows(tmp_path) == [
        {"step": "9", "train/loss": "2.5", "val/loss": "", "lr": ""},
        {"step": "19", "train/loss": "1.5", "val/loss": "1.75", "lr": ""},
        {"step": "29", "train/loss": "", "val/loss": "", "lr": "0.1"},
    ]


def test_a_resumed_run_goes_on_in_the_file_and_says_anew_what_it_does_again(tmp_path):
    log(tmp_path, (9, {"loss": 3.0}), (19, {"loss": 8.0, "old": 1.0}), (29, {"loss": 9.0}))
    log(tmp_path, (19, {"loss": 2.0}), (29, {"loss": 1.0}), (39, {"loss": 0.5, "new": 1.0}))
    assert rows(tmp_path) == [
        {"step": "9", "loss": "3.0", "old": "", "new": ""},
        {"step": "19", "loss": "2.0", "old": "1.0", "new": ""},
        {"step": "29", "loss": "1.0", "old": "", "new": ""},
        {"step": "39", "loss": "0.5", "old": "", "new": "1.0"},
    ]
    assert [path.name for path in tmp_path.iterdir()] == ["metrics.csv"]


@pytest.mark.parametrize("entries", [(), ((9, {"loss": 3.0}),)])
def test_a_resume_that_logs_nothing_keeps_the_file(tmp_path, entries):
    log(tmp_path, *entries)
    before = (tmp_path / "metrics.csv").read_text() if entries else None
    log(tmp_path)
    assert (tmp_path / "metrics.csv").exists() == bool(entries)
    assert not entries or (tmp_path / "metrics.csv").read_text() == before


def test_what_depends_on_the_clock_stands_in_a_file_of_its_own(tmp_path):
    log(tmp_path, (9, {"loss": 3.0, "throughput/mfu": 0.5}), (19, {"throughput/mfu": 0.25}), (19, {"loss": 2.0}))
    assert rows(tmp_path) == [{"step": "9", "loss": "3.0"}, {"step": "19", "loss": "2.0"}]
    assert (tmp_path / "throughput.csv").read_text().split() == ["step,mfu", "9,0.5", "19,0.25"]
