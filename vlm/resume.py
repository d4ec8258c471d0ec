"""Going on with a run exactly where it was."""

import sys
from pathlib import Path
from typing import Any

from vlm import config as conf
from vlm.errors import UserError


def resume_run(where: str, overrides: list[str]) -> int:
    """Resumes a run and returns the exit status.

    Args:
        where: The run's folder, one of its checkpoints, or "last" for the newest run under runs/.
        overrides: The values that may change: trainer, logger, callbacks, data.num_workers.
    """
    from vlm import checkpoint as ckpt
    from vlm.training import train

    path = find(where)
    loaded = ckpt.read(path)
    config = conf.check_resume_overrides(overrides, loaded["vlm"]["config"])
    folder = path.parent.parent
    if finished(loaded, config) and (folder / "evaluation").is_dir():
        print(f"{folder}: the run is finished, at step {loaded['global_step']}; raise trainer.max_epochs to train on")
        return 0
    print(f"resuming {folder} at step {loaded['global_step']}", file=sys.stderr)
    return train(config, folder=folder, checkpoint=path)


def find(where: str) -> Path:
    """The checkpoint to go on from.

    Raises:
        UserError: There is none.
    """
    if where == "last":
        found = sorted(Path("runs").glob("*/*/checkpoints/last.ckpt"), key=lambda path: path.stat().st_mtime)
        for path in reversed(found):
            if _loads(path):
                return path
        raise UserError("resume=last: there is no run with a checkpoint under runs/; name a run's folder")
    path = Path(where)
    if path.is_dir():
        last = path / "checkpoints" / "last.ckpt"
        if not last.is_file():
            raise UserError(f"resume={where}: there is no checkpoint at {last}; name another run's folder")
        return last
    if not path.is_file():
        raise UserError(f"resume={where}: no such run or checkpoint; give a run's folder, a .ckpt file, or last")
    return path


def _loads(path: Path) -> bool:
    from vlm import checkpoint as ckpt

    try:
        ckpt.read(path)
    except UserError as fault:
        print(f"passed over: {fault}", file=sys.stderr)
        return False
    return True


def finished(loaded: dict[str, Any], config: dict[str, Any]) -> bool:
    """Whether the checkpoint stands at the end that the config sets."""
    limits = config["trainer"]
    epochs, steps = limits.get("max_epochs"), limits.get("max_steps", -1)
    done = loaded["loops"]["fit_loop"]["epoch_progress"]["current"]["processed"]
    return bool((epochs and epochs > 0 and done >= epochs) or (steps > 0 and loaded["global_step"] >= steps))
