"""Trains, resumes, evaluates and uses a captioner on a GPU, and compares CPU and GPU in float32.

    python benchmarks/gpu/end_to_end.py [--steps 400] [OVERRIDES]

Trains with workers, pinned memory and validations that decode, resumes for a quarter more steps, evaluates the best
checkpoint on both devices, and captions a folder of images with each device and precision.
"""

import argparse
import json
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
from device import require_gpu
from PIL import Image

ROOT = Path(__file__).parents[2]
VLM = [sys.executable, "-c", "from vlm.cli.main import main; main()"]
WORDS = ("replayed", "error", "warning", "compiled")


def run(*command: str) -> None:
    """Runs a command, prints its status and the relevant lines, and exits if it failed."""
    done = subprocess.run(command, capture_output=True, text=True)
    lines = [line for line in (done.stdout + done.stderr).splitlines() if any(word in line.lower() for word in WORDS)]
    print(f"status {done.returncode}: {' '.join(command[1:])[:150]}", *lines[-4:], sep="\n   ", flush=True)
    if done.returncode:
        sys.exit(done.stderr[-1500:])


def evaluate(checkpoint: Path, device: str, place: Path) -> tuple[list[Any], float]:
    """Returns the captions and the loss of the validation split."""
    options = ["--split", "val", "--device", device, "--out", str(place), "trainer.precision=32-true"]
    run(*VLM, "evaluate", "-c", str(checkpoint), *options)
    metrics = json.loads((place / "metrics.json").read_text())
    return json.loads((place / "predictions.json").read_text()), metrics["val/loss"]


def captions(images: Path, checkpoint: Path, out: Path, *options: str) -> list[str]:
    """Returns the captions of a folder."""
    run(*VLM, "caption", str(images), "-c", str(checkpoint), *options, "--format", "jsonl", "--out", str(out))
    return [json.loads(line)["caption"] for line in out.read_text().splitlines()]


def draw(folder: Path, count: int = 100) -> None:
    folder.mkdir()
    for number in range(count):
        noise = np.random.default_rng(number).integers(0, 255, (64, 64, 3), dtype=np.uint8)
        Image.fromarray(noise).resize((128, 128)).save(folder / f"{number:03}.png")


def agreement(place: Path, best: Path) -> None:
    """Prints how many captions are the same on both devices."""
    (one, loss), (other, others) = (evaluate(best, device, place / device) for device in ("cpu", "cuda"))
    print(f"evaluate: {sum(a == b for a, b in zip(one, other, strict=True))} of {len(one)} captions alike; ", end="")
    print(f"loss {loss:.6f} on the CPU, {others:.6f} on the GPU")
    draw(place / "images")
    for beam in ("1", "4"):
        outputs = [
            captions(
                place / "images",
                best,
                place / f"{device}_{precision}_{beam}.jsonl",
                *["--device", device, "--precision", precision, "--beam", beam],
            )
            for device, precision in (("cpu", "fp32"), ("cuda", "fp32"), ("cuda", "bf16"))
        ]
        alike = [sum(a == b for a, b in zip(outputs[0], each, strict=True)) for each in outputs[1:]]
        print(f"caption --beam {beam}: of {len(outputs[0])} alike, in fp32 {alike[0]}, in bf16 {alike[1]}", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=400)
    parser.add_argument("overrides", nargs="*")
    args = parser.parse_args()
    require_gpu()
    with tempfile.TemporaryDirectory() as place:
        overrides = [f"runs={place}/runs", "name=end_to_end", "trainer=gpu", "data=shapes", "data.num_workers=4"]
        overrides += ["callbacks.progress=null", "trainer.val_check_interval=100", "trainer.max_epochs=-1"]
        train = [sys.executable, str(ROOT / "train.py")]
        run(*train, *overrides, f"trainer.max_steps={args.steps}", *args.overrides)
        (folder,) = Path(place).glob("runs/end_to_end/*")
        run(*train, f"resume={folder}", f"trainer.max_steps={args.steps + args.steps // 4}")
        agreement(Path(place), folder / "checkpoints" / "best.ckpt")


if __name__ == "__main__":
    main()
