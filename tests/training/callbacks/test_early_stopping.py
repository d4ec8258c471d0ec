"""The end of a run without gains, against the rule stated over all scores at once."""

import csv
import random
from types import SimpleNamespace

import pytest
from journey import only_run
from small import command

from vlm.errors import SharedError
from vlm.training.callbacks.checkpoints import EarlyStopping
from vlm.training.run.fit import main


def trainer(score: float) -> SimpleNamespace:
    state = SimpleNamespace(fn="fit")
    return SimpleNamespace(
        sanity_checking=False, state=state, callback_metrics={"val/x": score}, should_stop=False, is_global_zero=False
    )


def stops_after(scores: list[float], patience: int, min_gain: float) -> int | None:
    """The first validation by which none of the last `patience` ones beat the best before them by enough."""
    best, waited = float("inf"), 0
    for place, score in enumerate(scores, 1):
        waited = 0 if best - score > min_gain else waited + 1
        best = score if waited == 0 else best
        if waited == patience:
            return place
    return None


def run(callback: EarlyStopping, scores: list[float]) -> int | None:
    for place, score in enumerate(scores, 1):
        state = callback.state_dict()  # each validation is a process of its own, as if the run was killed after it
        callback = EarlyStopping(
            monitor="val/x", mode=callback.mode, patience=callback.patience, min_gain=callback.min_gain
        )
        callback.load_state_dict(state)
        now = trainer(score)
        callback.on_train_start(now, None)
        assert not now.should_stop
        callback.on_validation_end(now, None)
        if now.should_stop:
            resumed = trainer(score)
            callback.on_train_start(resumed, None)
            assert resumed.should_stop
            return place
    return None


@pytest.mark.parametrize("seed", range(30))
def test_it_ends_where_the_rule_says_in_one_process_or_many(seed: int) -> None:
    rng = random.Random(seed)
    scores = [float(rng.randrange(8)) for _ in range(12)]
    patience, gain = rng.randrange(1, 4), rng.choice([0.0, 1.0])
    expected = stops_after(scores, patience, gain)
    assert run(EarlyStopping(monitor="val/x", mode="min", patience=patience, min_gain=gain), scores) == expected
    negative = [-score for score in scores]
    assert run(EarlyStopping(monitor="val/x", mode="max", patience=patience, min_gain=gain), negative) == expected


def test_no_number_is_no_gain() -> None:
    assert run(EarlyStopping(monitor="val/x", mode="min", patience=2, min_gain=0), [3, float("nan"), float("nan")]) == 3


def test_a_metric_that_is_not_logged_is_named() -> None:
    with pytest.raises(SharedError, match=r"early_stopping\.monitor: val/y is not logged; choose one of val/x"):
        EarlyStopping(monitor="val/y", mode="min", patience=2, min_gain=0).on_validation_end(trainer(1.0), None)


@pytest.mark.slow
def test_a_run_that_learns_nothing_ends_and_stays_ended(tmp_path, capsys) -> None:
    arguments = [one for one in command("tagging") if "callbacks" not in one]
    stop = ["patience=2", "min_gain=1000"]
    stuck = ["callbacks=early_stopping", *(f"callbacks.early_stopping.{one}" for one in stop), "trainer.max_epochs=9"]
    assert main([*arguments, *stuck, f"runs={tmp_path}", "callbacks.progress=null"]) == 0
    assert "stopped early: val/loss did not improve in 2 validations" in capsys.readouterr().out
    folder = only_run(tmp_path)

    def epochs() -> int:
        with (folder / "metrics.csv").open() as file:
            return sum(bool(row["val/loss"]) for row in csv.DictReader(file))

    assert epochs() == 3
    assert main([f"resume={folder}"]) == 0
    assert epochs() == 3
