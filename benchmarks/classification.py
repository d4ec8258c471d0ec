"""Compares training a ViT classifier with bare steps of timm's model of the same size.

    python benchmarks/classification.py --root FOLDER [--model vit_tiny vit_small] [--device cuda] [--out FILE.json]

"Ours" is the whole of `python train.py task=classification data=image_folder`: files decoded and augmented by a worker,
Lightning, logging, progress bar. The peer is timm's vit_tiny_patch16_224 or vit_small_patch16_224 on random pixels in
memory: cross-entropy, clipping, torch's default AdamW. Blocks of steps of both sides alternate in one process; ratios
are medians over blocks. On a GPU both compute in bfloat16, and CUDA events are timed.
"""

import argparse
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path

from vlm.machine import tune

tune()  # applies to both sides
sys.path.insert(0, str(Path(__file__).parent))

import timm
import torch
import torch.nn.functional as F
from interleaved import InterleavedTimer, report
from torch import nn

from vlm.config.compose import compose
from vlm.training.run.run import Run
from vlm.training.run.train import silence_libraries

MODELS = {"vit_tiny": (192, 3), "vit_small": (384, 6)}


def peer_step(name: str, classes: int, batch: int, device: str) -> Callable[[], None]:
    """Returns a function that takes one training step of the peer."""
    model = timm.create_model(f"{name}_patch16_224", num_classes=classes).to(device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-4)
    images = torch.randn(batch, 3, 224, 224, device=device)
    labels = torch.randint(classes, (batch,), device=device)

    def step() -> None:
        with torch.autocast(device, torch.bfloat16, enabled=device == "cuda"):
            loss = F.cross_entropy(model(images), labels)
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)

    return step


def compare(root: str, name: str, *, batch: int, block: int, rounds: int, device: str) -> dict[str, float]:
    dim, heads = MODELS[name]
    with tempfile.TemporaryDirectory() as runs:
        overrides = ["task=classification", "data=image_folder", f"data.root={root}", "data.image_size=224"]
        overrides += ["model=classifier_small", f"model.size.dim={dim}", f"model.size.num_heads={heads}"]
        overrides += ["model.size.encoder_depth=12", "model.size.mlp_ratio=4", "model.encoder.patch_size=16"]
        overrides += ["trainer=gpu"] if device == "cuda" else ["trainer=cpu", "data.num_workers=1"]
        overrides += [f"data.batch_size={batch}", f"runs={runs}", "schedule=constant"]
        run = Run(compose([*overrides, "optim.lr=3e-4", "trainer.limit_val_batches=0", "trainer.max_epochs=99"]))
        peer = peer_step(name, len(run.data.source.classes), batch, device)
        timed = InterleavedTimer(peer, block=block, rounds=rounds, device=device)
        run.trainer.callbacks.append(timed)
        run.fit()
    return timed.result()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--root", required=True, help="Folder with train/ and val/, each with a folder a class.")
    parser.add_argument("--model", nargs="+", choices=MODELS, default=list(MODELS))
    parser.add_argument("--batch", type=int, default=8)
    parser.add_argument("--block", type=int, default=4)
    parser.add_argument("--rounds", type=int, default=8)
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--out")
    args = parser.parse_args()
    silence_libraries()
    options = {"batch": args.batch, "block": args.block, "rounds": args.rounds, "device": args.device}
    report({name: compare(args.root, name, **options) for name in args.model}, args.out)


if __name__ == "__main__":
    main()
