"""Singular values of Muon's updates after orthogonalisation, for momenta of a real training, and the time it takes.

    python benchmarks/orthogonalization.py [--steps 3] [--repeats 10] OVERRIDES

Trains `vlm train OVERRIDES` and keeps Nesterov momenta of five matrices at its first step, in its middle and at its
end. Each is orthogonalised by the quintic of Jordan et al. (2024), iterated five times on the matrix itself in float64,
float32 and bfloat16, and by `vlm.training.step.optim.orthogonalize` with all products in float32 and the last ones in
bfloat16. Printed are the least and the greatest singular value among those that were at least a hundredth and a
thousandth of the largest, and the distance to the iterations in float64, relative to their norm. Times are medians of
all matrices of the model, stacked by shape, in turn.
"""

import argparse
import statistics
import time
from collections.abc import Callable
from functools import partial
from typing import Any

from vlm.machine import tune

tune()

import lightning as L
import torch
from torch import Tensor

from vlm.config.compose import compose
from vlm.training.run.run import Run
from vlm.training.run.train import silence_libraries
from vlm.training.step.optim import Muon, orthogonalize

JORDAN = (3.4445, -4.7750, 2.0315)
SHARES = (1e-2, 1e-3)
ITERATIONS = 5


def orthogonalize_directly(matrices: Tensor, dtype: torch.dtype = torch.float32) -> Tensor:
    a, b, c = JORDAN
    x = matrices.mT if matrices.shape[1] > matrices.shape[2] else matrices
    x = (x / x.norm(dim=(1, 2), keepdim=True).clamp(min=1e-12)).to(dtype)
    for _ in range(ITERATIONS):
        gram = x @ x.mT
        x = torch.baddbmm(x, torch.baddbmm(gram, gram, gram, beta=b, alpha=c), x, beta=a)
    return (x.mT if matrices.shape[1] > matrices.shape[2] else x).to(matrices.dtype)


VARIANTS: dict[str, Callable[[Tensor], Tensor]] = {
    "directly, float32": orthogonalize_directly,
    "directly, bfloat16": partial(orthogonalize_directly, dtype=torch.bfloat16),
    "ours, float32": partial(orthogonalize, iterations=ITERATIONS),
    "ours, last bfloat16": partial(orthogonalize, iterations=ITERATIONS, last=torch.bfloat16),
}


class KeepMomenta(L.Callback):
    """Keeps the Nesterov momenta of all matrices at the given steps."""

    def __init__(self, steps: list[int]) -> None:
        self.steps = steps
        self.momenta: list[dict[str, Tensor]] = []

    def on_before_optimizer_step(self, trainer: L.Trainer, pl_module: L.LightningModule, optimizer: Any) -> None:
        if trainer.global_step not in self.steps:
            return
        muon = getattr(optimizer, "optimizer", optimizer)
        assert isinstance(muon, Muon), "optim=muon"
        names = {parameter: name for name, parameter in pl_module.named_parameters()}
        kept = {}
        for group in muon.param_groups:
            for parameter in group["params"] if group["matrices"] else ():
                momentum = muon.state[parameter].get("momentum", torch.zeros_like(parameter))
                after = torch.lerp(momentum, parameter.grad, 1 - group["momentum"])
                kept[names[parameter]] = torch.lerp(parameter.grad, after, group["momentum"]).flatten(1).clone()
        self.momenta.append(kept)


def print_singular_values(name: str, momentum: Tensor) -> None:
    u, before, v = torch.linalg.svd(momentum.double(), full_matrices=False)
    counts = [int((before >= share * before[0]).sum()) for share in SHARES]
    print(f"  {name} {tuple(momentum.shape)}, of {len(before)} singular values {counts} count")
    expected = orthogonalize_directly(momentum.double()[None], torch.float64)[0]
    for variant, function in VARIANTS.items():
        found = function(momentum[None])[0].double()
        along = ((u.mT @ found) * v).sum(1)  # along each singular direction of the momentum
        ranges = "  ".join(f"{along[:count].min():.3f} to {along[:count].max():.3f}" for count in counts)
        print(f"    {variant:22}{ranges}  distance {(found - expected).norm() / expected.norm():.1e}")


def print_times(momenta: dict[str, Tensor], repeats: int) -> None:
    shapes: dict[torch.Size, list[Tensor]] = {}
    for momentum in momenta.values():
        shapes.setdefault(momentum.shape, []).append(momentum)
    stacks = [torch.stack(matrices) for matrices in shapes.values()]
    times: dict[str, list[float]] = {variant: [] for variant in VARIANTS}
    for _ in range(repeats + 1):
        for variant, function in VARIANTS.items():
            start = time.perf_counter()
            for stack in stacks:
                function(stack)
            times[variant].append(time.perf_counter() - start)
    print(f"{len(momenta)} matrices, {sum(momentum.numel() for momentum in momenta.values()):,} weights")
    for variant, seconds in times.items():
        print(f"  {variant:22}{1e3 * statistics.median(seconds[1:]):7.1f} ms")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=3, help="steps of the training")
    parser.add_argument("--repeats", type=int, default=10, help="repetitions of the timing")
    args, overrides = parser.parse_known_args()
    silence_libraries()
    kept = KeepMomenta([0, args.steps // 2, args.steps - 1])
    run = Run(compose([*overrides, f"trainer.max_steps={args.steps}", "trainer.limit_val_batches=0"]))
    run.trainer.callbacks.append(kept)
    run.fit()
    names = sorted(kept.momenta[0])
    for step, momenta in zip(kept.steps, kept.momenta, strict=True):
        print(f"step {step + 1}")
        for name in names[:: max(1, len(names) // 5)][:5]:
            print_singular_values(name, momenta[name])
    print_times(kept.momenta[-1], args.repeats)


if __name__ == "__main__":
    main()
