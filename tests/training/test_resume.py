"""Going on with a run: what its end is named by, and what cannot be gone on from."""

import pytest
from tiny_checkpoints import FILES

from vlm.errors import UserError
from vlm.training.resume import reached, resume_run


@pytest.mark.parametrize(
    ("limits", "keys"),
    [
        ({"max_epochs": 4, "max_steps": -1}, ""),
        ({"max_epochs": 4, "max_steps": 6}, "trainer.max_steps"),
        ({"max_epochs": 3}, "trainer.max_epochs"),
        ({"max_epochs": 2, "max_steps": 5}, "trainer.max_epochs and trainer.max_steps"),
        ({"max_epochs": None, "max_steps": 7}, ""),
        ({"max_epochs": -1, "max_steps": -1}, ""),
    ],
)
def test_a_finished_run_names_the_keys_that_ended_it(limits, keys):
    loaded = {"global_step": 6, "loops": {"fit_loop": {"epoch_progress": {"current": {"processed": 3}}}}}
    assert reached(loaded, {"trainer": limits}) == keys


def test_a_checkpoint_without_an_optimiser_names_another_only_where_it_is(tmp_path):
    best = tmp_path / "best.ckpt"
    best.write_bytes((FILES / "classification.ckpt").read_bytes())
    with pytest.raises(UserError, match=r"has no optimiser to go on with; give the last\.ckpt of a run, or a run"):
        resume_run(str(best), [])
    (tmp_path / "last.ckpt").touch()
    with pytest.raises(UserError, match=f"; resume {tmp_path}/last.ckpt"):
        resume_run(str(best), [])
