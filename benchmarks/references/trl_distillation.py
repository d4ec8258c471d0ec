"""Compares the divergence of a student from a teacher with TRL's GKDTrainer.generalized_jsd_loss.

It runs in an environment with vlm, its `test` extra and trl (see trl.sh), and writes TRL's values to the fixture that
tests/nn/test_distillation_loss.py compares ours with.
"""

import json
import sys
from pathlib import Path

import torch
import torch.nn.functional as F

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT / "tests" / "helpers"), str(ROOT)]

import distillation_cases as cases


def main() -> None:
    import trl
    from trl.experimental.gkd import GKDTrainer

    print(f"trl {trl.__version__}, torch {torch.__version__}: mean divergence of 10 of 14 tokens, 11 outcomes")
    fixture = {}
    for name, options in cases.CASES.items():
        sides = cases.make_sides()
        logits = F.linear(sides.hidden, sides.weight), F.linear(sides.teacher_hidden, sides.teacher_weight)
        theirs = cases.summarise(GKDTrainer.generalized_jsd_loss(*logits, labels=sides.labels, **options), sides)
        ours = cases.compute(**options)
        largest = max(
            abs(value - other)
            for part, values in ours["gradients"].items()
            for value, other in zip(values, theirs["gradients"][part], strict=True)
        )
        losses = f"loss {ours['loss']:.7f} and {theirs['loss']:.7f}"
        print(f"{name:<25} {losses}; gradients differ by at most {largest:.1e}")
        fixture[name] = theirs
    path = ROOT / "tests" / "checkpoint" / "files" / "trl_distillation.json"
    path.write_text(json.dumps(fixture, indent=0) + "\n")


if __name__ == "__main__":
    main()
