"""Two processes are one, whether they hold a model each or one between them."""

import json
import shutil
from collections.abc import Callable
from functools import cache
from pathlib import Path

import pytest
import torch
from compare import rows
from fork_server import ForkServer
from image_text import saved_image_text
from journey import only_run
from PIL import Image
from small import COMPARING, MODELS, TASKS, accumulation_options, command, task_of
from training_faults import DDP, EXACT, run_two

from vlm.checkpoint import load as ckpt
from vlm.training.step import blocks as compiling

FSDP = ["trainer=fsdp", *DDP[1:]]
OWN = {"captioning": ["task.val_captions=null"], "classification": ["task.mixup=0", "task.cutmix=0"]}
# Gradients that cancel to noise, such as those of keys' biases, stay small: Adam would make whole steps of them.
STEP = ["data.batch_size=6", "+optim.eps=1e-4", "trainer.precision=32-true"]
# One task of a loss term; those of mixed and of compared samples and of two terms are nightly.
KINDS = ("captioning",)


def each_task(slow: tuple[str, ...]) -> list:
    """All tasks and models; those that are not slow are tested nightly."""
    return [
        pytest.param(task, marks=pytest.mark.slow if task in slow else pytest.mark.nightly)
        for task in [*TASKS, *MODELS]
    ]


@pytest.fixture(scope="module")
def finished(forks: ForkServer, tmp_path_factory: pytest.TempPathFactory) -> Callable[[str, str], Path]:
    """The folder of a finished run of a task, which starts when it is first needed.

    It is a run of one process ("one"), or of two with DDP or FSDP.
    """

    @cache
    def run_folder(task: str, kind: str) -> Path:
        args = command(task, *EXACT, *OWN.get(task_of(task), []), *accumulation_options(task), *STEP)
        runs = tmp_path_factory.mktemp(f"{task}_{kind}")
        options = {"ddp": DDP, "fsdp": FSDP}.get(kind)
        ended = run_two(forks, [*args, *options], cwd=runs) if options else [forks.run(args, cwd=runs)]
        assert all(end.status == 0 for end in ended), "\n".join(end.output for end in ended)
        return only_run(runs / "runs")

    return run_folder


@pytest.mark.parametrize("task", each_task(KINDS))
def test_two_processes_take_the_steps_of_one(task: str, finished) -> None:
    check_same_steps(finished(task, "ddp"), finished(task, "one"))


@pytest.mark.slow
def test_two_processes_with_one_model_between_them_take_the_steps_of_one(finished) -> None:
    check_same_steps(finished("captioning", "fsdp"), finished("captioning", "one"))


def check_same_steps(folder: Path, reference_folder: Path) -> None:
    one, two = rows(reference_folder), rows(folder)
    assert len(one) == len(two) > 8
    for mine, reference in zip(two, one, strict=True):
        assert mine.keys() == reference.keys()
        for name, value in reference.items():
            # Perplexities grow with the loss; all else is a share, or bounded like one.
            tolerance = {"abs": 1e-5} if "loss" in name else {"abs": 1e-6, "rel": 1e-6 if "cider" in name else 1e-5}
            assert float(mine[name]) == pytest.approx(float(value), **tolerance), (reference["step"], name)


@pytest.mark.slow
def test_two_processes_fine_tune_a_folder_as_one(forks: ForkServer, tmp_path: Path) -> None:
    """Rows with an image and rows of text alone; batches of one process may lack images."""
    torch.manual_seed(7)
    saved_image_text(tmp_path / "theirs", "smolvlm")
    conversations: list[dict[str, object]] = []
    for number in range(24):
        texts = [{"user": "what is it?", "assistant": f"a cat {number}"}]
        conversations.append({"texts": texts, "split": "val" if number > 19 else "train"})
        if number % 3 == 0:
            Image.effect_noise((60, 40), 20 + number).save(tmp_path / f"{number}.png")
            conversations[-1]["image"] = f"{number}.png"
    (tmp_path / "chats.jsonl").write_text("".join(json.dumps(row) + "\n" for row in conversations))
    words = ["task=conversations", "model=pretrained", f"model.path={tmp_path / 'theirs'}", "data=conversations"]
    words += [f"data.path={tmp_path / 'chats.jsonl'}", "data.batch_size=4", "data.num_workers=0", "test=false"]
    words += ["trainer.max_steps=6", "trainer.precision=32-true", "+optim.eps=1e-4", "optim.lr=1e-3"]
    weights = []
    for kind, options in {"one": ["trainer=cpu"], "ddp": DDP, "fsdp": FSDP}.items():
        (tmp_path / kind).mkdir()
        args = [*words, *options]
        started = [forks.run(args, cwd=tmp_path / kind)] if kind == "one" else run_two(forks, args, cwd=tmp_path / kind)
        assert all(end.status == 0 for end in started), "\n".join(end.output for end in started)
        weights.append(ckpt.read(only_run(tmp_path / kind / "runs") / "checkpoints" / "last.ckpt")["state_dict"])
    start = ckpt.read(str(tmp_path / "theirs"))["state_dict"]
    for name, tensor in weights[0].items():
        assert not torch.equal(tensor, start[name]), name
        for other in weights[1:]:
            torch.testing.assert_close(other[name], tensor, rtol=0, atol=1e-5, msg=name)


@pytest.fixture
def pairs(tmp_path: Path) -> list[str]:
    """Options of a training on pairs of answers, in steps of two batches; some pairs have an image."""
    torch.manual_seed(7)
    saved_image_text(tmp_path / "theirs", "smolvlm")
    rows: list[dict[str, object]] = []
    for number in range(28):
        row = {"prompt": "what is it?", "chosen": f"a cat {number}", "rejected": "a dog or so" + " so" * (number % 3)}
        rows.append({**row, "split": "val" if number > 23 else "train"})
        if number % 3 == 0:
            Image.effect_noise((60, 40), 20 + number).save(tmp_path / f"{number}.png")
            rows[-1]["image"] = f"{number}.png"
    (tmp_path / "pairs.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    words = ["task=preferences", "model=pretrained", f"model.path={tmp_path / 'theirs'}", "data=preferences"]
    words += [f"data.path={tmp_path / 'pairs.jsonl'}", "data.batch_size=4", "data.num_workers=0", "test=false"]
    words += ["trainer.max_epochs=3", "trainer.precision=32-true", "+optim.eps=1e-4", "optim.lr=1e-3"]
    return [*words, "trainer.accumulate_grad_batches=2", "trainer.log_every_n_steps=1", "task.cross_entropy=0.5"]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("options", "kind"),
    [(["task.cache_reference=true"], "ddp"), (["model/adapt=lora"], "ddp"), (["task.loss=simpo"], "fsdp")],
    ids=["cached reference", "adapters", "sharded without a reference"],
)
def test_two_processes_train_on_preferences_as_one(
    forks: ForkServer, pairs: list[str], tmp_path: Path, options: list[str], kind: str
) -> None:
    folders = []
    for name, more in {"one": ["trainer=cpu"], "two": DDP if kind == "ddp" else FSDP}.items():
        (tmp_path / name).mkdir()
        args = [*pairs, *options, *more]
        runs = run_two(forks, args, cwd=tmp_path / name) if name == "two" else [forks.run(args, cwd=tmp_path / name)]
        assert all(end.status == 0 for end in runs), "\n".join(end.output for end in runs)
        folders.append(only_run(tmp_path / name / "runs"))
    check_same_steps(*reversed(folders))
    logged = rows(folders[0])
    assert {"train/loss_chosen", "train/accuracy", "val/loss_chosen"} <= logged[-1].keys()
    one, two = (ckpt.read(folder / "checkpoints" / "last.ckpt")["state_dict"] for folder in folders)
    for key, tensor in one.items():
        torch.testing.assert_close(two[key], tensor, rtol=0, atol=1e-5, msg=key)


@pytest.mark.slow
def test_a_reference_of_sharded_weights_is_refused(forks: ForkServer, pairs: list[str], tmp_path: Path) -> None:
    for end in run_two(forks, [*pairs, *FSDP], cwd=tmp_path):
        assert end.status == 2
        assert (
            "task=preferences: a reference model is not supported with sharded weights; use trainer=ddp" in end.output
        )


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["ddp", "fsdp"])
def test_every_sample_is_evaluated_once(kind: str, finished) -> None:
    files = (finished("captioning", run) / "evaluation/test/predictions.json" for run in ("one", kind))
    one, ids = ([record["image_id"] for record in json.loads(file.read_text())] for file in files)
    assert sorted(ids) == sorted(one) and len(set(one)) == len(one) == 12


@pytest.mark.slow
def test_only_the_first_rank_writes(finished) -> None:
    runs = [finished("captioning", kind) for kind in ("one", "ddp", "fsdp")]
    one, *others = ({str(path.relative_to(run)) for path in run.rglob("*")} for run in runs)
    assert others == [one, one]


@pytest.mark.slow
def test_a_sharded_checkpoint_is_that_of_one_process(finished) -> None:
    ddp, fsdp = (ckpt.read(finished("captioning", kind) / "checkpoints" / "last.ckpt") for kind in ("ddp", "fsdp"))
    assert fsdp["state_dict"].keys() == ddp["state_dict"].keys() and fsdp["ema"].keys() == ddp["ema"].keys()
    for part in ("state_dict", "ema"):
        for name, tensor in ddp[part].items():
            assert type(fsdp[part][name]) is torch.Tensor
            torch.testing.assert_close(fsdp[part][name], tensor, rtol=0, atol=1e-5)
    mine, reference = (loaded["optimizer_states"][0] for loaded in (fsdp, ddp))
    assert mine["param_groups"] == reference["param_groups"]
    for index, state in reference["state"].items():
        for name, moment in state.items():
            torch.testing.assert_close(mine["state"][index][name], moment, rtol=1e-3, atol=1e-6)
    model = ckpt.load_model(fsdp)
    assert not model.training


@pytest.mark.slow
def test_a_sharded_run_goes_on_sharded_and_in_one_process(forks: ForkServer, finished, tmp_path: Path) -> None:
    folder = finished("captioning", "fsdp")
    name = folder.name
    for kind in ("one", "fsdp"):
        shutil.copytree(folder, tmp_path / kind / name)
    more, one_process = "trainer.max_epochs=3", ["trainer.strategy=auto", "trainer.devices=1"]
    alone = forks.run([f"resume={tmp_path / 'one' / name}", more, *one_process], cwd=tmp_path)
    assert alone.status == 0, alone.output
    for end in run_two(forks, [f"resume={tmp_path / 'fsdp' / name}", more], cwd=tmp_path):
        assert end.status == 0, end.output
    one, two = (ckpt.read(tmp_path / kind / name / "checkpoints" / "last.ckpt") for kind in ("one", "fsdp"))
    assert one["global_step"] == two["global_step"]
    for part in ("state_dict", "ema"):
        for key, tensor in one[part].items():
            torch.testing.assert_close(two[part][key], tensor, rtol=0, atol=1e-5)


@pytest.mark.nightly  # step/test_blocks.py compiles and recomputes blocks of one process in a slow run
@pytest.mark.skipif(compiling.missing(on_gpu=False) is not None, reason="needs a C++ compiler")
@pytest.mark.parametrize("kind", ["ddp", "fsdp"])
def test_compiled_and_recomputed_blocks_take_the_same_steps(kind: str, forks: ForkServer, finished, tmp_path) -> None:
    options = [*(DDP if kind == "ddp" else FSDP), "compile=true", "activation_checkpointing=true"]
    args = command("captioning", *EXACT, *OWN["captioning"], *accumulation_options("captioning"), *STEP, *options)
    for end in run_two(forks, args, cwd=tmp_path, timeout=300):
        assert end.status == 0, end.output
    own = ckpt.read(only_run(tmp_path / "runs") / "checkpoints" / "last.ckpt")["state_dict"]
    reference = ckpt.read(finished("captioning", "one") / "checkpoints" / "last.ckpt")["state_dict"]
    assert own.keys() == reference.keys()
    for name, tensor in reference.items():
        torch.testing.assert_close(own[name], tensor, rtol=0, atol=1e-5)


@pytest.mark.parametrize("task", each_task(COMPARING))
def test_a_step_sends_one_message_beside_its_gradients(task: str, forks: ForkServer, tmp_path: Path) -> None:
    args = command(task, *DDP, "trainer.max_steps=7", "callbacks.checkpoints.every_n_steps=100")
    quiet = [*args, "trainer.log_every_n_steps=100", "trainer.limit_val_batches=0"]
    for end in run_two(forks, quiet, cwd=tmp_path, patch="import messages; messages.count()"):
        assert end.status == 0, end.output
        steps = [line for line in end.output.splitlines() if "MESSAGES" in line]
        # Embeddings are sent to all ranks, after their number, and the gradients of them back.
        beside = "all_gather all_gather all_reduce " if task in COMPARING else ""
        assert len(steps) == 4 and all(line.endswith(f"MESSAGES {beside}all_reduce.") for line in steps), steps
