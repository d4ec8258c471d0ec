"""Going on with a run: what its end is named by, and what cannot be gone on from."""

import pytest
import torch
from tiny_checkpoints import FILES

from vlm.errors import UserError
from vlm.training.run.train import find_last_checkpoint, find_reached_limits, resume_run


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
    assert find_reached_limits(loaded, {"trainer": limits}) == keys


@pytest.mark.slow
def test_a_checkpoint_without_an_optimiser_names_another_only_where_it_is(tmp_path):
    best = tmp_path / "best.ckpt"
    best.write_bytes((FILES / "classification.ckpt").read_bytes())
    with pytest.raises(UserError, match=r"has no optimiser state to resume from; resume a run, or its last\.ckpt"):
        resume_run(str(best), [])
    (tmp_path / "last.ckpt").touch()
    with pytest.raises(UserError, match=f"; resume {tmp_path}/last.ckpt"):
        resume_run(str(best), [])


def test_a_last_checkpoint_that_is_not_finite_is_passed_over(tmp_path, capsys):
    folder = tmp_path / "checkpoints"
    folder.mkdir()
    (folder / "previous.ckpt").write_bytes((FILES / "classification.ckpt").read_bytes())
    content = torch.load(FILES / "classification.ckpt", weights_only=True)
    name = next(name for name, tensor in content["state_dict"].items() if tensor.is_floating_point())
    content["state_dict"][name].view(-1)[0] = float("nan")
    torch.save(content, folder / "last.ckpt")
    assert find_last_checkpoint(tmp_path) == folder / "previous.ckpt"
    assert f"skipped: {folder}/last.ckpt: its weights are not finite numbers ({name})" in capsys.readouterr().err
    (folder / "previous.ckpt").unlink()
    with pytest.raises(UserError, match=r"no checkpoint to resume from \(.*last\.ckpt: its weights are not finite"):
        find_last_checkpoint(tmp_path)
