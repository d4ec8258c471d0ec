"""Evaluating a checkpoint as training's own test does."""

import sys
from pathlib import Path

from vlm.config.compose import override
from vlm.config.stored import check_stored, contained
from vlm.errors import UserError


def evaluate_checkpoint(
    path: str,
    overrides: list[str],
    *,
    split: str | None,
    out: str | None,
    device: str,
    batch_size: int | None,
    trust: str | None,
) -> int:
    """Evaluates a checkpoint, prints its scores and controls, and writes them where asked; returns the exit status.

    Raises:
        UserError: The checkpoint, its data or an override is at fault.
    """
    from vlm.checkpoint import load as ckpt
    from vlm.checkpoint.verify import refusing
    from vlm.evaluation.report.results import write_results
    from vlm.training.fit import check, chose, quiet, table
    from vlm.training.run import build_data, build_task, build_trainer, check_fit, evaluate

    quiet()
    loaded = ckpt.read(path)
    with refusing(path):
        check_stored(loaded["vlm"]["config"])
        config = contained(loaded["vlm"]["config"], Path(path).resolve().parent.parent)
    config = override(config, overrides)
    check(config)
    if batch_size is not None:
        config["data"]["eval_batch_size"] = batch_size
    config["trainer"] |= {"accelerator": {"cuda": "gpu"}.get(device, device), "devices": 1, "strategy": "auto"}
    check_fit(config)
    data = build_data(config)
    with refusing(path):
        data.restore(loaded["vlm"])
    split = split or data.final_split
    data.split(split)
    task = build_task(config, ckpt.load_model(loaded, trust=trust), data)
    trainer = build_trainer(config, Path(out or "."), logger=False, enable_progress_bar=False)
    results = evaluate(trainer, task, data, split)
    print(table(results) + chose(config, results))
    for reason in task.unread:
        print(f"error: {reason}", file=sys.stderr)
    if out is not None:
        try:
            write_results(Path(out), task, results, data)
            print(f"\nreport  {Path(out) / 'report.html'}")
        except OSError as fault:
            raise UserError(f"--out {out}: cannot be written ({fault.strerror}); choose another folder", 1) from fault
    return 1 if task.unread else 0
