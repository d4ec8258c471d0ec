"""Training from a config: check, build, fit, test the best checkpoint, say what to do next."""

import logging
import shlex
import signal
import sys
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Any

from vlm.config.check import check as check_nodes
from vlm.config.check import misfit
from vlm.config.command import report, run
from vlm.config.compose import node
from vlm.config.links import origins
from vlm.config.override import split_option
from vlm.config.target import find, trust
from vlm.errors import Limit, Range, SharedError, UserError
from vlm.tuning import tune

# Nodes that the program completes by name: a task takes its model, a model the sizes that the data decide.
COMPLETED = ("data", "model", "task")


class FolderName(Limit):
    """A name that is one folder inside of another."""

    def holds(self, value: Any) -> bool:
        return not isinstance(value, str) or (value.strip() not in ("", ".", "..") and not set(value) & set("/\\\0"))

    def __str__(self) -> str:
        return "the name of a folder, without /"


TYPES = {
    "seed": Annotated[int, Range(0)],
    "name": Annotated[str, FolderName()],
    "runs": str,
    "test": bool,
    "layer_decay": Annotated[float, Range(above=0)],
    "compile": bool | None,
    "activation_checkpointing": bool | None,  # runs of before it have none
}


def main(argv: list[str] | None = None) -> int:
    """Runs `train.py` with these arguments and returns the exit status."""
    tune()
    argv = sys.argv[1:] if argv is None else argv
    try:
        package, argv = split_option(argv, "trust")
        if package:
            trust(package)
        resume, overrides = split_option(argv)
        if resume is None:
            return run(train, overrides, check, check_suited)
        from vlm.training.resume import resume_run

        return resume_run(resume, overrides)
    except UserError as fault:
        return report(fault)
    except KeyboardInterrupt:
        return 128 + signal.SIGINT


def check(config: dict[str, Any]) -> None:
    """Reports every fault of a config at once, before anything is read or written."""
    from vlm.training.feature_cache import feature_faults
    from vlm.training.run import data_node

    nodes = {"data": data_node(config), "model": node(config, "model")}
    check_nodes({**config, **nodes}, config, types=TYPES, completed=COMPLETED)
    faults = [*size_faults(nodes, ""), *model_faults(config), *feature_faults(config), *accumulation_faults(config)]
    if faults:
        raise UserError("\n".join(origins(config, faults)))


def model_faults(config: dict[str, Any]) -> list[str]:
    """A line where the model is not of the kind that the task trains."""
    wrong = misfit(config["model"], config["task"], "model")
    if wrong is None:
        return []
    given, wanted = wrong
    what = f"model: {given} does not fit task={config['task_name']}, which needs a {wanted}"
    return [f"{what}; choose another model, or none, and the task brings its own"]


def accumulation_faults(config: dict[str, Any]) -> list[str]:
    """A line where batches are accumulated whose samples a loss compares with one another."""
    count = config["trainer"].get("accumulate_grad_batches") or 1
    task: Any = find(config["task"]["_target_"])
    if count == 1 or not task.compares_samples(config["task"]):
        return []
    what = f"trainer.accumulate_grad_batches: {count} batches do not compare their samples as one large batch does"
    return [f"{what}, which task={config['task_name']} needs; set it to 1 (data.batch_size and devices may grow)"]


def check_suited(config: dict[str, Any]) -> None:
    """Reports data and models that are for another task; asked where a config cannot be resolved, as it then is."""
    if found := model_faults(config):
        raise UserError("\n".join(found))
    from vlm.training.run import check_fit

    check_fit(config)


def size_faults(value: Any, path: str) -> Iterator[str]:
    """Yields a line for each size that does not divide another, such as heads that do not divide the width."""
    if not isinstance(value, dict):
        return
    for whole, part in (("dim", "num_heads"), ("image_size", "patch_size")):
        size, divisor = value.get(whole), value.get(part)
        if not isinstance(size, int) or not isinstance(divisor, int) or value.get("head_dim"):
            continue
        if size % divisor:
            yield f"{path}{part}: {divisor} does not divide {whole}, {size}; change one of them"
    for name, child in value.items():
        yield from size_faults(child, f"{path}{name}.")


def train(config: dict[str, Any], *, folder: Path | None = None, checkpoint: Path | None = None) -> int:
    """Trains as a checked config says, in a new run folder or on from a checkpoint of the run in `folder`.

    Raises:
        UserError: The config, the data or the machine is at fault.
    """
    from vlm.training import slurm
    from vlm.training.callbacks.signals import Stopped, stopping
    from vlm.training.resume import resume_run
    from vlm.training.run import Run
    from vlm.training.run_folder import release

    if folder is None and (begun := slurm.begun(config)):
        return resume_run(str(begun), [])
    quiet()
    run = None
    try:
        with stopping():
            run = Run(config, folder=folder, checkpoint=checkpoint)
            run.fit()
            results = run.test() if config["test"] else {}
            if run.trainer.is_global_zero:
                print(closing(run.folder, results, run.example(), chose(config, results)), flush=True)
    except Stopped as stop:
        return leave(run, stop)
    except Exception as fault:
        return fail(run, fault)
    finally:
        release(run.folder if run else folder)
    return 0


def leave(run: Any, stop: Any) -> int:
    """Says what becomes of a run that a signal stopped, and returns the exit status.

    Args:
        run: The run; None if it was stopped while it was put together.
        stop: The vlm.training.callbacks.signals.Stopped.
    """
    from vlm.training import slurm
    from vlm.training.processes import first

    if not first():  # when all have saved, another status would have the first one killed while it speaks
        return 0 if stop.saved else stop.status
    if run and not stop.saved and run.trainer.strategy.launcher:
        run.trainer.strategy.launcher.kill(signal.SIGTERM)
    if stop.saved:
        print(f"\n{stop}; everything is saved. Go on with:\n  {resume_command(run.folder)}", flush=True)
    elif run and (run.folder / "checkpoints" / "last.ckpt").is_file():  # the callback that saves may not be set up yet
        print(f"\n{stop}. Go on with:\n  {resume_command(run.folder)}", flush=True)
    if stop.signum == signal.SIGUSR1:
        print(slurm.requeue(), flush=True)
    return stop.status


def fail(run: Any, fault: Exception) -> int:
    """Raises what is to be said of a fault, and ends the run's other processes; returns the status of a silent one."""
    from vlm.training.faults import explain
    from vlm.training.launcher import end_processes

    found = explain(fault, run)
    if run:
        end_processes(run.trainer)
        if isinstance(found, SharedError) and not run.trainer.is_global_zero:
            return found.status
    if found is fault:
        raise fault
    raise found from fault


def resume_command(folder: Path) -> str:
    return f"python train.py {shlex.quote(f'resume={folder}')}"


def closing(folder: Path, results: dict[str, float], example: str, chosen: str) -> str:
    """What a finished run prints: its scores, where everything is, and the next command to try."""
    best = folder / "checkpoints" / "best.ckpt"
    lines = ["", f"run         {folder}", f"checkpoint  {best}"]
    if results:
        report = folder / "evaluation" / next(iter(results)).split("/")[0] / "report.html"
        lines = ["", "the best checkpoint", table(results) + chosen, *lines, f"report      {report}"]
    return "\n".join([*lines, f"try         {example} -c {shlex.quote(str(best))}"])


def chose(config: dict[str, Any], results: dict[str, float]) -> str:
    """A line that marks scores on the split by which the checkpoint was chosen; nothing for others."""
    monitor = str((config["callbacks"].get("checkpoints") or {}).get("monitor"))
    if not results:
        return ""
    split = next(iter(results)).split("/")[0]
    if not monitor.startswith(f"{split}/"):
        return ""
    return f"\n({split} also chose the checkpoint, by {monitor.split('/')[1]}: its scores are a little too good)"


def table(results: dict[str, float]) -> str:
    """Scores with their controls beside them, a line a metric."""
    found = dict.fromkeys(name.split("@")[1] for name in results if "@" in name)
    controls = sorted(found, key=lambda name: ("low", "high", name).index(name))  # the interval before the controls
    split = next(iter(results)).split("/")[0]
    names = [name.split("/")[1] for name in results if "@" not in name]
    width = max(map(len, names)) + 2
    lines = [f"{split:<{width}}{'model':>10}{''.join(f'{control:>12}' for control in controls)}"]
    for name in names:
        beside = [results.get(f"{split}/{name}@{control}") for control in controls]
        cells = "".join(f"{'' if cell is None else _number(cell):>12}" for cell in beside)
        lines.append(f"{name:<{width}}{_number(results[f'{split}/{name}']):>10}{cells}".rstrip())
    return "\n".join(lines)


def _number(value: float) -> str:
    return f"{value:.4f}" if abs(value) < 10_000 else f"{value:.3e}"


def quiet() -> None:
    """Silences what libraries say of themselves; what concerns the user is said by us."""
    libraries = "lightning.pytorch", "lightning.fabric", "lightning.pytorch.utilities.rank_zero"
    for name in (*libraries, "torch.utils.cpp_extension"):
        logging.getLogger(name).setLevel(logging.ERROR)
    warnings.filterwarnings("ignore", module="lightning")
    warnings.filterwarnings("ignore", module="torch")
