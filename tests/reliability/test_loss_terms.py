"""Loss terms over ranks: two processes take the steps of one."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from fork_server import ForkServer
from training_faults import run_two
from two_terms import run

from vlm.config.compose import compose
from vlm.errors import UserError
from vlm.training.config.check import accumulation_faults, check

CASES = {"TwoTerms": {"batch_size": 4, "accumulate": 4}, "Contrastive": {"batch_size": 8}}


@pytest.mark.slow
@pytest.mark.parametrize("kind", CASES)
def test_two_ranks_take_the_steps_of_one(kind: str, forks: ForkServer, tmp_path: Path) -> None:
    options: Any = CASES[kind]
    run(kind, out=tmp_path / "one.json", **options)
    two = f"import pathlib, two_terms; two_terms.run({kind!r}, out=pathlib.Path('two.json'), ranks=2, **{options})"
    for end in run_two(forks, [], cwd=tmp_path, patch=f"{two}; raise SystemExit(0)", timeout=240):
        assert end.status == 0, end.output
    one, *ranks = (json.loads((tmp_path / f"{name}.json").read_text()) for name in ("one", "two.0", "two.1"))
    if kind == "TwoTerms":
        assert 0 in ranks[0]["marked"] and 0 in ranks[1]["marked"]
        assert "val/loss_second" in one["val"]
    for found in ranks:
        assert found["losses"] == [pytest.approx(step, rel=1e-12) for step in one["losses"]]
        if kind == "TwoTerms":  # validation batches are smaller on two ranks, and so are the negatives in them
            assert found["val"] == pytest.approx(one["val"], rel=1e-12)
        for name, weight in one["weights"].items():
            own, reference = (torch.tensor(values, dtype=torch.float64) for values in (found["weights"][name], weight))
            torch.testing.assert_close(own, reference, rtol=0, atol=1e-12)


def test_batches_that_are_compared_are_not_accumulated(monkeypatch: pytest.MonkeyPatch) -> None:
    config = compose(["trainer.accumulate_grad_batches=2"])
    check(config)
    compares = classmethod(lambda cls, options: True)
    monkeypatch.setattr("vlm.tasks.captioning.train.Captioning.compares_samples", compares)
    with pytest.raises(UserError, match=r"trainer\.accumulate_grad_batches: 2 .* set it to 1"):
        check(config)
    assert not accumulation_faults(compose([]))
