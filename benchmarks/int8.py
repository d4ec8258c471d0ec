"""Measures what int8 costs in quality, compared with float32: captions of a captioner, or a language model's loss.

    python benchmarks/int8.py data/sample/captioner.ckpt [--count 1000] [KEY=VALUE ...]
    python benchmarks/int8.py FILE.gguf --text data/tinyshakespeare/input.txt [--count 40]

A captioner captions images of its data's test split greedily. Printed are the number of captions that are equal in both
precisions, COCO's metrics of both, and the 95% interval of the difference of CIDEr over images (paired bootstrap, 1,000
draws). A language model reads windows of 512 tokens. Printed are bits per byte in both precisions, the largest and mean
difference of logits, and how often both predict the same token.
"""

import argparse
import math
from pathlib import Path
from typing import Any

import numpy as np
import torch

import vlm

PRECISIONS = ("fp32", "int8")
WINDOW = 512


def captions(path: str, count: int, overrides: list[str]) -> None:
    from vlm.checkpoint.load import read
    from vlm.checkpoint.stored import thaw
    from vlm.config.compose import override
    from vlm.config.tree import resolve
    from vlm.evaluation.metrics.captions import CaptionMetric
    from vlm.training.run.build import build_data

    about = read(path)["vlm"]
    data = build_data(override(resolve(thaw(about["config"]).tree).tree, overrides))
    data.restore(about)
    split = data.split("test")
    records = [split.record(place) for place in range(min(count, len(split)))]
    images, references = [record.image() for record in records], [record["references"] for record in records]
    texts, each = {}, {}
    for precision in PRECISIONS:
        model = vlm.load(path, device="cpu", precision=precision)
        texts[precision] = [caption.text for caption in model.caption(images)]
        metric = CaptionMetric()
        metric.update([record.id for record in records], texts[precision], references)
        print(precision, {name: round(value, 4) for name, value in metric.compute().items()})
        scores: Any = metric.scores
        each[precision] = np.array([scores.per_image[record.id]["cider"] for record in records])
    same = sum(one == other for one, other in zip(*texts.values(), strict=True))
    print(f"{same} of {len(records)} captions are equal")
    change = each["int8"] - each["fp32"]
    draws = np.random.default_rng(0).integers(len(change), size=(1000, len(change)))
    low, high = np.quantile(change[draws].mean(1), [0.025, 0.975])
    print(f"CIDEr changes by {change.mean():+.4f} ({low:+.4f} to {high:+.4f})")


@torch.inference_mode()
def language(path: str, text: str, count: int) -> None:
    models = {precision: vlm.load(path, device="cpu", precision=precision) for precision in PRECISIONS}
    tokenizer: Any = models["fp32"]._predictor.tokenizer
    ids = torch.tensor(tokenizer.encode(Path(text).read_text()))
    windows = ids[: len(ids) // WINDOW * WINDOW].view(-1, WINDOW)[:count]
    size = sum(len(tokenizer.decode(window[1:].tolist()).encode()) for window in windows)
    nats, largest, mean, same = dict.fromkeys(PRECISIONS, 0.0), 0.0, 0.0, 0
    for window in windows:
        logits = {}
        for precision, model in models.items():
            decoder: Any = model._predictor.model
            logits[precision] = decoder.head(decoder(window[None]))[0, :-1].float()
            nats[precision] += torch.nn.functional.cross_entropy(logits[precision], window[1:], reduction="sum").item()
        error = (logits["int8"] - logits["fp32"]).abs()
        largest, mean = max(largest, error.max().item()), mean + error.mean().item() / len(windows)
        same += (logits["int8"].argmax(-1) == logits["fp32"].argmax(-1)).sum().item()
    bits = ", ".join(f"{precision} {total / math.log(2) / size:.4f}" for precision, total in nats.items())
    print(f"bits per byte: {bits}")
    print(f"logits differ by {mean:.4f} in the mean, {largest:.3f} at most")
    print(f"the same token is expected in {100 * same / (len(windows) * (WINDOW - 1)):.2f}% of all places")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("checkpoint")
    parser.add_argument("overrides", nargs="*", metavar="KEY=VALUE")
    parser.add_argument("--text", help="a language model's text")
    parser.add_argument("--count", type=int, default=1000, help="images, or windows of the text")
    options = parser.parse_args()
    if options.text:
        language(options.checkpoint, options.text, options.count)
    else:
        captions(options.checkpoint, options.count, options.overrides)


if __name__ == "__main__":
    main()
