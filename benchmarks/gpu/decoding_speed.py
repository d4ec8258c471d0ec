"""Compares captions a second on a GPU with `generate` of transformers, in bfloat16 with 32 tokens each; then a queue.

    python benchmarks/gpu/decoding_speed.py [--shapes S M] [--cases 64x1 64x4] [--no-cudnn] [--rounds 3] [--queue 1024]
                                            [--out FILE.json]

The models are those of benchmarks/generate.py. The first call of each side is timed separately, because ours records
its step in it. A case is IMAGESxBEAMS. In the queue the most frequent token ends a caption, so that captions end at
different steps.
"""

import argparse
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1]))

import generate as cpu
import torch
from device import keep, require_gpu
from torch import Tensor

from vlm.decoding.loop import decode
from vlm.decoding.options import Decoding
from vlm.models.encoder_decoder import VisionLanguageModel

CASES = ("1x1", "64x1", "256x1", "1x4", "64x4", "256x4")  # images x beams
QUEUE_ROWS = (64, 256)
DTYPE = torch.bfloat16


@torch.inference_mode()
def captions(model: VisionLanguageModel, images: Tensor, decoding: Decoding, *, rows: int, eos: int) -> list[list[int]]:
    parts = (range(at, min(at + rows, len(images))) for at in range(0, len(images), rows))
    chunks = ((part, model.encode(images[part.start : part.stop])) for part in parts)
    options: dict[str, Any] = {"bos_id": cpu.BOS, "eos_id": eos, "rows": rows, "device": "cuda"}
    hypotheses = dict(decode(model.decoder, chunks, decoding, **options))
    return [hypotheses[place][0].tokens for place in range(len(images))]


def time_rounds(work: Callable[[], list[list[int]]], rounds: int) -> tuple[list[list[int]], float, float]:
    """Returns the captions, the seconds of the first call, and the median seconds of the others."""
    times, outputs = [], []
    for _ in range(rounds + 1):
        start = time.perf_counter()
        outputs = work()
        torch.cuda.synchronize()
        times.append(time.perf_counter() - start)
    return outputs, times[0], statistics.median(times[1:])


def pixels(shape: str, count: int) -> Tensor:
    side = cpu.SHAPES[shape]["image"]
    return torch.randn(count, 3, side, side, device="cuda", dtype=DTYPE)


def on_gpu(shape: str, rows: int) -> tuple[Any, Any]:
    """Returns our model and theirs."""
    ours, theirs = cpu.models(shape, rows, torch.float32)
    return ours.to("cuda", DTYPE), theirs.to("cuda", DTYPE)


def compare(shape: str, batch: int, beam: int, rounds: int) -> dict[str, float]:
    ours, theirs = on_gpu(shape, batch * beam)
    images, tokens = pixels(shape, batch), cpu.TOKENS
    decoding = Decoding(beam=beam, max_tokens=tokens - 1, logprobs=False)
    options = {"max_new_tokens": tokens, "num_beams": beam, "do_sample": False}
    outputs, first, own = time_rounds(lambda: captions(ours, images, decoding, rows=batch, eos=-1), rounds)
    peer, peer_first, other = time_rounds(lambda: theirs.generate(images, **options)[:, 1:tokens].tolist(), rounds)
    same = sum(a == b for a, b in zip(outputs, peer, strict=True))
    print(
        f"{shape} batch {batch} beam {beam}: ours {1e3 * own:.1f} ms (first {first:.2f} s), peer {1e3 * other:.1f} ms "
    )
    print(f"   (first {peer_first:.2f} s), {other / own:.2f} times as fast, same {same} of {batch}", flush=True)
    return {"ours_s": own, "peer_s": other, "ratio": other / own, "first_s": first, "same": same, "images": batch}


def queue(shape: str, count: int) -> None:
    ours, _ = on_gpu(shape, max(QUEUE_ROWS))
    images, decoding = pixels(shape, count), Decoding(max_tokens=30, logprobs=False)
    some = captions(ours, images[:64], decoding, rows=64, eos=-1)
    common = int(torch.tensor(some).flatten().mode().values)
    for rows in QUEUE_ROWS:
        _, first, own = time_rounds(lambda rows=rows: captions(ours, images, decoding, rows=rows, eos=common), 1)
        print(f"{shape} queue of {count}, {rows} rows: {count / own:.0f} images/s (first {first:.2f} s)", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shapes", nargs="+", choices=list(cpu.SHAPES), default=list(cpu.SHAPES))
    parser.add_argument("--cases", nargs="+", default=list(CASES), metavar="IMAGESxBEAMS")
    parser.add_argument("--no-cudnn", action="store_true")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--queue", type=int, default=1024, help="images of the queue; 0 leaves it out")
    parser.add_argument("--out")
    args = parser.parse_args()
    require_gpu()
    if args.no_cudnn:
        torch.backends.cuda.enable_cudnn_sdp(False)
    cpu.prepack = cpu.prepack_for_decoding = lambda *_, **__: None  # both pack weights for a CPU
    figures = {}
    for shape in args.shapes:
        for case in args.cases:
            batch, beam = map(int, case.split("x"))
            figures[f"{shape} {case}"] = compare(shape, batch, beam, args.rounds)
        if args.queue:
            queue(shape, args.queue)
    keep(figures, args.out)


if __name__ == "__main__":
    main()
