"""Writes figures of `vlm bench` for one case as JSON, with options that show the effect of a change.

    python benchmarks/gpu/training_speed.py CASE [--text FILE] [--cifar FILE.tar] [--images FOLDER] [--vocab 50304]
                                            [--memory] [--signals] [--no-cudnn] [--tf32] [--profile] [--steps 20]
                                            [--out FILE.json] [OVERRIDES]

CASE: gpt2 (124 million parameters, rows of 1,024 characters, GPT-2's vocabulary), lm10m (experiment=shakespeare_gpu),
vits (ViT-S on drawn images), jpeg (the same on photos in class folders), cifar (experiment=cifar10), captioner (shape
M). With --memory the first batch is reused for every step, so that the GPU never waits for data. --signals adds the
callback that `vlm bench` leaves out. --profile prints the kernels that take most time in four steps.
"""

import argparse
import json
from collections.abc import Iterator
from typing import Any

import torch
from device import keep, require_gpu
from torch.profiler import ProfilerActivity, profile

from vlm.cli import batch_size, bench
from vlm.config.compose import compose
from vlm.data.text.text_field import TextField
from vlm.training.callbacks.speed import StepTimes
from vlm.training.data_module import Data
from vlm.training.run.train import silence_libraries

TEXT = ["task=language_modeling", "data=text", "tokenizer=char", "trainer=gpu"]
CLASSIFIER = ["task=classification", "model=classifier_small", "data.image_size=224", "data.batch_size=512"]
CLASSIFIER += ["trainer=gpu"]
CAPTIONER = ["data=shapes", "data.source.captions_per_image=5", "data.image_size=224", "model=small"]
CAPTIONER += ["model.size.dim=384", "model.size.num_heads=6", "model.size.encoder_depth=12"]
CASES = {
    "gpt2": [*TEXT, "model=gpt2", "data.max_len=1024", "data.batch_size=64", "optim.lr=6e-4"],
    "lm10m": ["experiment=shakespeare_gpu"],
    "vits": ["data=shapes_classes", *CLASSIFIER],
    "jpeg": ["data=image_folder", *CLASSIFIER],
    "cifar": ["experiment=cifar10", "trainer=gpu"],
    "captioner": [*CAPTIONER, "data.batch_size=128", "trainer=gpu"],
}
KEPT = ("parameters", "batch_size", "step_ms", "step_ms_p90", "images_per_s", "tokens_per_s", "data_wait", "mfu")
PROFILED = range(14, 18)  # steps


class Again:
    """Repeats the first batch of a loader as often as the loader has batches; nothing waits for data."""

    asked = waited = 0.0

    def __init__(self, loader: Any) -> None:
        self.length, self.batch = len(loader), next(iter(loader)).pin_memory()

    def __len__(self) -> int:
        return self.length

    def __iter__(self) -> Iterator[Any]:
        return (self.batch for _ in range(self.length))


def feed_from_memory() -> None:
    """Makes training reuse one batch from memory."""
    read = Data.train_dataloader
    Data.train_dataloader = lambda data: Again(read(data))  # type: ignore[method-assign]


def profile_steps() -> None:
    """Prints the kernels of some steps, sorted by time."""
    end, kernels = StepTimes.on_train_batch_end, profile(activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA])

    def on_train_batch_end(times: StepTimes, trainer: Any, module: Any, outputs: Any, batch: Any, number: int) -> None:
        end(times, trainer, module, outputs, batch, number)
        if trainer.global_step == PROFILED.start:
            kernels.start()
        if trainer.global_step == PROFILED.stop:
            torch.cuda.synchronize()
            kernels.stop()
            table = kernels.key_averages()
            print(table.table(sort_by="self_cuda_time_total", row_limit=25, max_name_column_width=70))

    StepTimes.on_train_batch_end = on_train_batch_end  # type: ignore[method-assign]


def vary(args: argparse.Namespace) -> None:
    """Applies the variants that the arguments ask for."""
    if args.vocab or args.case == "gpt2":  # the character tokenizer has far fewer tokens
        sizes = {"vocab_size": args.vocab or 50257}
        TextField.sizes = property(lambda field: sizes)  # type: ignore[assignment, method-assign]
    if args.memory:
        feed_from_memory()
    if args.signals:
        batch_size.EXCLUDED_CALLBACKS = tuple(name for name in batch_size.EXCLUDED_CALLBACKS if name != "signals")
    if args.no_cudnn:
        torch.backends.cuda.enable_cudnn_sdp(False)
    if args.tf32:
        torch.set_float32_matmul_precision("high")
    if args.profile:
        profile_steps()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("case", choices=CASES)
    parser.add_argument("--text", help="for gpt2 and lm10m: a file of text")
    parser.add_argument("--cifar", help="for cifar: CIFAR-10 as a tar of class folders")
    parser.add_argument("--images", help="for jpeg: a folder of photos in class folders")
    parser.add_argument("--vocab", type=int, help="size of the vocabulary, such as 50304, a multiple of 64")
    for variant in ("memory", "signals", "no-cudnn", "tf32", "profile"):
        parser.add_argument(f"--{variant}", action="store_true")
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--out")
    parser.add_argument("overrides", nargs="*")
    args = parser.parse_intermixed_args()  # overrides may follow options
    need = {"gpt2": "text", "lm10m": "text", "cifar": "cifar", "jpeg": "images"}.get(args.case)
    place = getattr(args, need) if need else None
    if need and place is None:
        parser.error(f"{args.case} needs --{need}")
    require_gpu()
    silence_libraries()
    vary(args)
    key = "root" if args.case == "jpeg" else "path"
    overrides = [*CASES[args.case], *([f"data.{key}={place}"] if place else [])]
    overrides += ["data.num_workers=0"] if args.memory else []  # workers would keep running during the steps
    overrides += args.overrides
    figures = bench.measure_speed(compose(overrides), steps=args.steps)
    kept = {name: figures[name] for name in (*KEPT, "peak_memory_gib") if name in figures}
    print(args.case, json.dumps(kept))
    keep(kept, args.out)


if __name__ == "__main__":
    main()
