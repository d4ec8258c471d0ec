"""Compares models from Bengio to Vaswani on one task, with the same data, tokens and steps.

    python benchmarks/history.py text --data FILE --steps 1000 --out DIR         # loss of text, parameters, speed
    python benchmarks/history.py scenes --steps 400 --out DIR                    # exact translations by source length
    python benchmarks/history.py runs --runs RUN RUN RUN --out DIR               # BLEU by source length of trained runs

The first two train their models one after another on one thread; `runs` reads the test results of trained translators.
Each writes PART.json and PART.png to --out. Times are CPU seconds, which a busy machine changes little: `cpu_s` is that
of the whole command, `tokens_per_cpu_s` counts training steps alone, with batches of one length.
"""

import argparse
import json
import os
import re
import resource
import subprocess
import sys
import time
from collections.abc import Iterable, Mapping
from itertools import cycle
from pathlib import Path
from typing import Any

os.environ["OMP_NUM_THREADS"] = "1"

ROOT = Path(__file__).resolve().parents[1]
MODELS = {
    "text": ("neural_lm", "lstm", "lm_tiny"),
    "scenes": ("seq2seq", "bahdanau", "translator_tiny"),
}
BOUNDS = {"scenes": (8, 13, 18, 100), "runs": (8, 11, 14, 17, 100)}  # maximum source words of each group
SECONDS = 2  # CPU time in which steps are counted


def overrides(part: str, given: argparse.Namespace) -> list[str]:
    """Returns the overrides that all models of a part share."""
    if part == "text":
        steps = [f"trainer.max_steps={given.steps}", f"trainer.val_check_interval={given.steps}"]
        return ["task=language_modeling", "experiment=shakespeare_cpu", f"data.path={given.data}", *steps]
    longer = ["data.source.max_objects=3", f"trainer.max_steps={given.steps}", "data.max_len=64"]
    return ["task=translation", *longer, "task.val_texts=64"]


def train(part: str, model: str, given: argparse.Namespace) -> dict[str, Any]:
    """Trains and tests a model; returns its parameters, CPU seconds and evaluation results."""
    runs = given.out / "runs" / part / model
    command = [sys.executable, "train.py", *overrides(part, given), f"model={model}", "trainer=cpu"]
    command += ["callbacks.progress=null", f"runs={runs.resolve()}"]
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    if done.returncode:
        raise SystemExit(done.stdout + done.stderr)
    folder = max(runs.glob("*/*/evaluation/*"), key=os.path.getmtime)
    parameters = re.search(r"parameters  ([\d,]+)", done.stdout)
    assert parameters is not None
    return {
        "model": model,
        "parameters": int(parameters[1].replace(",", "")),
        "cpu_s": round(after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime, 1),
        **read_metrics(folder, part),
    }


def read_metrics(folder: Path, part: str) -> dict[str, Any]:
    """Returns the metrics of an evaluation, for translators also by the length of the source."""
    found = {"metrics": json.loads((folder / "metrics.json").read_text())}
    if part not in BOUNDS:
        return found
    return found | {"by_length": by_length(json.loads((folder / "details.json").read_text())["texts"], part)}


def speed(model: str, lengths: Iterable[int] = (64, 256)) -> dict[str, int]:
    """Returns training tokens per CPU second by row length, for 12 rows per step and 65 characters."""
    import torch

    from vlm.config.compose import compose
    from vlm.training.run.build import build_model

    torch.set_num_threads(1)
    found = {}
    for length in lengths:
        config = compose(["task=language_modeling", f"model={model}", f"data.max_len={length}"])
        built, _ = build_model(config, {"vocab_size": 65})
        optimizer = torch.optim.AdamW(built.parameters(), lr=1e-3, fused=True)
        tokens = torch.randint(65, (12, length + 1))
        steps, began = -2, time.process_time()
        while steps < 1 or time.process_time() - began < SECONDS:
            if steps == 0:  # two steps warm up
                began = time.process_time()
            logits = built.head(built.train()(tokens[:, :-1]))
            torch.nn.functional.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten()).backward()
            optimizer.step()
            optimizer.zero_grad()
            steps += 1
        found[str(length)] = round(steps * 12 * length / (time.process_time() - began))
    return found


def by_length(texts: Mapping[str, Mapping[str, Any]], part: str) -> list[dict[str, Any]]:
    """Returns BLEU and the share of exact texts by the number of source words."""
    from sacrebleu import corpus_bleu

    groups: list[dict[str, Any]] = []
    least = 0
    for most in BOUNDS[part]:
        rows = [row for row in texts.values() if least < len(row["text"].split()) <= most]
        if rows:
            written, references = [row["translation"] for row in rows], [row["reference"] for row in rows]
            exact = sum(map(str.__eq__, written, references)) / len(rows)
            words = sum(len(row["text"].split()) for row in rows) / len(rows)
            bleu = corpus_bleu(written, [references]).score
            groups.append({"words": round(words, 1), "texts": len(rows), "bleu": round(bleu, 1), "exact": exact})
        least = most
    return groups


def plot(part: str, rows: list[dict[str, Any]], path: Path) -> None:
    """Plots loss over CPU time for text, and BLEU or exact texts over source length for translation."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=(5, 3.2), layout="constrained")
    styles = cycle(("o-", "s--", "^:"))  # curves may lie on one another
    for row in rows:
        if part in BOUNDS:
            what = "exact" if part == "scenes" else "bleu"
            words, scores = zip(*((one["words"], one[what]) for one in row["by_length"]), strict=True)
            axes.plot(words, scores, next(styles), label=row["model"])
            axes.set(xlabel="words of the source", ylabel=f"{what}, test")
        else:
            loss = next(value for name, value in row["metrics"].items() if name.endswith("/loss"))
            axes.plot(row["cpu_s"], loss, "o", label=f"{row['model']}, {row['parameters'] / 1e6:.2f} M")
            axes.set(xlabel="CPU seconds of the whole command", ylabel="loss, nats a token")
    axes.legend()
    figure.savefig(path, dpi=120)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("part", choices=[*MODELS, "runs"])
    parser.add_argument("--data")
    parser.add_argument("--steps", type=int, default=1000)
    parser.add_argument("--models", nargs="*", help="some of the part's")
    parser.add_argument("--runs", nargs="*", type=Path, default=[])
    parser.add_argument("--out", type=Path, required=True)
    given = parser.parse_args()
    if (given.part == "runs") != bool(given.runs):
        parser.error("runs and --runs go together")
    given.out.mkdir(parents=True, exist_ok=True)
    rows = []
    for model in given.runs or given.models or MODELS[given.part]:
        if given.runs:
            row = {"model": model.parent.name, **read_metrics(model / "evaluation" / "test", given.part)}
        else:
            row = train(given.part, model, given)
        if given.part == "text":
            row["tokens_per_cpu_s"] = speed(model)
        rows.append(row)
        print(json.dumps(row))
        (given.out / f"{given.part}.json").write_text(json.dumps(rows, indent=1) + "\n")
        plot(given.part, rows, given.out / f"{given.part}.png")


if __name__ == "__main__":
    main()
