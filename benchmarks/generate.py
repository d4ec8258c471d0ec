"""Compares captions a second with Hugging Face's `VisionEncoderDecoderModel.generate`, in one process.

    python benchmarks/generate.py [--shapes S M] [--precision fp32] [--onnx] [--rounds 7] [--queue 512]
                                  [--out FILE.json]

Both models have the same random weights. The peer computes in float32, its default; so does ours, or with --precision
bf16 in what `vlm caption` takes by default on a CPU that is faster in it. Both caption the same images from pixels, in
turns; ratios are medians over rounds. Both return token ids only, as the peer's documentation does. Without an end
token, each writes 32 tokens. In the queue, the number of tokens of each image is drawn once (mean 12, at most 30), and
both sides are made to end there by a change of the logits; the peer takes batches of the same size, in order. Memory is
the weights and the peak above them, each in its own process.

With --onnx a third side is ONNX Runtime with the graphs that `vlm export --to onnx` writes, with IO binding and the
same number of threads, in the same turns; it has no beam search and no queue.
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from vlm.machine import tune

tune()  # applies to both sides
os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")

import numpy as np
import torch
from engine_sides import onnx_texts
from torch import Tensor
from transformers import GPT2Config, GPT2LMHeadModel, LogitsProcessor, VisionEncoderDecoderModel, ViTConfig, ViTModel

from vlm.checkpoint.graph_files import trace_graph
from vlm.decoding.loop import decode
from vlm.decoding.options import Decoding
from vlm.models.context import Context
from vlm.models.decoder import Decoder
from vlm.models.encoder_decoder import VisionLanguageModel, encode_in_parts
from vlm.models.graphs import graphs_of
from vlm.models.pretrained.folder import Folder
from vlm.models.pretrained.load import load_hugging_face
from vlm.models.vit import ViT
from vlm.nn.step.packed import prepack, prepack_for_decoding
from vlm.nn.step.state import DecodeState

SHAPES = {
    "S": {"image": 96, "dim": 256, "heads": 4, "encoder": 6, "decoder": 6},
    "M": {"image": 224, "dim": 384, "heads": 6, "encoder": 12, "decoder": 6},
}
VOCAB, TOKENS, BOS, EOS = 8000, 32, 1, 2
CASES = {"batch 1": (1, 1), "batch 8": (8, 1), "batch 32": (32, 1), "beam 4, batch 8": (8, 4)}
QUEUE_ROWS = 32
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}


def models(shape: str, rows: int, dtype: torch.dtype) -> tuple[VisionLanguageModel, VisionEncoderDecoderModel]:
    """Returns ours, its weights packed for this many texts at once, and theirs, with the same weights."""
    ours, theirs = plain_models(shape)
    ours = ours.to(dtype)
    prepack(ours.encoder)
    prepack_for_decoding(ours.decoder, rows=rows)
    return ours, theirs


def plain_models(shape: str) -> tuple[VisionLanguageModel, VisionEncoderDecoderModel]:
    size = SHAPES[shape]
    torch.manual_seed(0)
    sizes = {"hidden_size": size["dim"], "num_attention_heads": size["heads"], "intermediate_size": 4 * size["dim"]}
    vit = ViTConfig(image_size=size["image"], patch_size=16, num_hidden_layers=size["encoder"], **sizes)
    gpt2 = GPT2Config(
        vocab_size=VOCAB,
        n_positions=TOKENS + 2,
        n_embd=size["dim"],
        n_layer=size["decoder"],
        n_head=size["heads"],
        bos_token_id=BOS,
        eos_token_id=None,
        pad_token_id=0,
        add_cross_attention=True,
        is_decoder=True,
    )
    theirs = VisionEncoderDecoderModel(encoder=ViTModel(vit, add_pooling_layer=False), decoder=GPT2LMHeadModel(gpt2))
    theirs.decoder.base_model.wpe.weight.data *= 8  # otherwise a random model repeats one token
    theirs.generation_config.update(decoder_start_token_id=BOS, pad_token_id=0)
    common = {"dim": size["dim"], "num_heads": size["heads"]}
    encoder = ViT(
        image_size=size["image"], patch_size=16, depth=size["encoder"], class_token=True, norm_eps=1e-12, **common
    )
    decoder = Decoder(
        vocab_size=VOCAB,
        max_len=TOKENS + 2,
        depth=size["decoder"],
        context_dim=size["dim"],
        activation="gelu_tanh",
        **common,
    )
    ours = VisionLanguageModel(encoder=encoder, decoder=decoder).eval()
    with tempfile.TemporaryDirectory() as folder:
        theirs.save_pretrained(folder)
        load_hugging_face(ours, Folder(folder))
    return ours, theirs.eval()


class OnnxRuntime:
    """The same model as ONNX graphs, decoded greedily."""

    def __init__(self, shape: str) -> None:
        import onnxruntime

        options = onnxruntime.SessionOptions()
        options.intra_op_num_threads = torch.get_num_threads()
        self.sessions = {}
        with tempfile.TemporaryDirectory() as folder:
            for graph in graphs_of(plain_models(shape)[0], image_size=SHAPES[shape]["image"]):
                path = Path(folder, f"{graph.name}.onnx")
                trace_graph(graph, form="onnx")(path)
                self.sessions[graph.name] = onnxruntime.InferenceSession(str(path), options)

    def __call__(self, images: Tensor) -> list[list[int]]:
        encoder, step = self.sessions["encoder"], self.sessions["step"]
        read, binding = encoder.io_binding(), step.io_binding()
        read.bind_cpu_input("images", images.numpy())
        encoded = [port.name for port in encoder.get_outputs()]
        for name in encoded:
            read.bind_output(name, "cpu")
        encoder.run_with_iobinding(read)
        for name, value in zip(encoded, read.get_outputs(), strict=True):
            binding.bind_ortvalue_input(name, value)
        return onnx_texts(step, binding, np.full((len(images), 1), BOS), TOKENS - 1)


@torch.inference_mode()
def run_ours(
    decoder: Any, model: VisionLanguageModel, images: Tensor, decoding: Decoding, *, eos: int, rows: int
) -> list[list[int]]:
    dtype = model.decoder.head_parts.weight.dtype
    chunks = (
        (
            range(at, min(at + rows, len(images))),
            encode_in_parts(model, images[at : at + rows].to(dtype)),
        )
        for at in range(0, len(images), rows)
    )
    captions = dict(decode(decoder, chunks, decoding, bos_id=BOS, eos_id=eos, rows=rows))
    return [captions[place][0].tokens for place in range(len(images))]


def side_by_side(
    ours: Callable[[], list[list[int]]], *, rounds: int, **peers: Callable[[], list[list[int]]]
) -> dict[str, dict[str, float]]:
    """Returns, by peer, the seconds of both sides, taken in turns, and how many times as fast ours is."""
    sides = {"ours": ours, **peers}
    texts = {name: work() for name, work in sides.items()}
    times: dict[str, list[float]] = {name: [] for name in sides}
    for number in range(rounds):
        for name, work in [*sides.items()][:: 1 if number % 2 else -1]:
            start = time.perf_counter()
            work()
            times[name].append(time.perf_counter() - start)
    rows = {}
    for name in peers:
        ratios = sorted(other / own for own, other in zip(times["ours"], times[name], strict=True))
        rows[name] = {
            "ours_s": statistics.median(times["ours"]),
            "peer_s": statistics.median(times[name]),
            "ratio": statistics.median(ratios),
            "ratio_min": ratios[0],
            "ratio_max": ratios[-1],
            "same_captions": sum(a == b for a, b in zip(texts["ours"], texts[name], strict=True)),
            "images": len(texts["ours"]),
        }
    return rows


def compare_fixed_lengths(
    shape: str, batch: int, beam: int, dtype: torch.dtype, *, rounds: int, onnx: bool
) -> dict[str, dict[str, float]]:
    """Compares a batch of captions of 32 tokens each."""
    ours, theirs = models(shape, batch * beam, dtype)
    images = torch.randn(batch, 3, SHAPES[shape]["image"], SHAPES[shape]["image"])
    decoding = Decoding(beam=beam, max_tokens=TOKENS - 1, logprobs=False)  # one more step is taken for the end token
    options = {"max_new_tokens": TOKENS, "num_beams": beam, "do_sample": False}
    peers: dict[str, Callable[[], list[list[int]]]] = {
        "transformers": lambda: theirs.generate(images, **options)[:, 1:TOKENS].tolist(),  # cut to the same length
    }
    if onnx and beam == 1:
        runtime = OnnxRuntime(shape)
        peers["ONNX Runtime"] = lambda: runtime(images)
    return side_by_side(
        lambda: run_ours(ours.decoder, ours, images, decoding, eos=-1, rows=batch), rounds=rounds, **peers
    )


def lengths(count: int) -> list[int]:
    """Returns the number of tokens of each caption, end token included: mean 12, at most 30."""
    drawn = np.random.default_rng(0).gamma(4.0, 3.0, count).round()
    return [int(length) for length in drawn.clip(4, 30)]


class EndAt(LogitsProcessor):
    """Forces the end token once a caption has its length, and forbids it before."""

    def __init__(self, wanted: list[int]) -> None:
        self.wanted = torch.tensor(wanted)

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        scores[:, EOS] = torch.where(input_ids.shape[1] >= self.wanted, torch.inf, -torch.inf)
        return scores


def queue(shape: str, count: int, dtype: torch.dtype, *, rounds: int) -> dict[str, dict[str, float]]:
    """Compares captions of different lengths, more of them than fit into a batch."""
    ours, theirs = models(shape, QUEUE_ROWS, dtype)
    images = torch.randn(count, 3, SHAPES[shape]["image"], SHAPES[shape]["image"])
    wanted = lengths(count)
    decoding = Decoding(max_tokens=TOKENS, logprobs=False)

    def engine() -> list[list[int]]:
        return run_ours(Ends(ours.decoder, wanted), ours, images, decoding, eos=EOS, rows=QUEUE_ROWS)  # type: ignore[arg-type]

    def peer() -> list[list[int]]:
        texts: list[list[int]] = []
        for at in range(0, count, QUEUE_ROWS):
            part = slice(at, at + QUEUE_ROWS)
            options = {"logits_processor": [EndAt(wanted[part])], "eos_token_id": EOS, "do_sample": False}
            rows = theirs.generate(images[part], max_new_tokens=TOKENS, **options)[:, 1:].tolist()
            texts += [row[:length] for row, length in zip(rows, wanted[part], strict=True)]
        return texts

    return side_by_side(engine, rounds=rounds, transformers=peer)


class Ends:
    """Wraps our decoder so that texts get given lengths; tracks the image of each row, changes logits like EndAt."""

    def __init__(self, decoder: Decoder, wanted: list[int]) -> None:
        self.decoder, self.max_len = decoder, decoder.max_len
        self.waiting = iter(wanted)
        self.wanted = self.age = torch.empty(0)

    def read(self, context: Context) -> Any:
        return self.decoder.read(context)

    def start(self, context: Context, **options: Any) -> DecodeState:
        state = self.decoder.start(context, **options)
        self.wanted = torch.tensor([next(self.waiting) for _ in range(len(context.states))])
        self.age = torch.zeros_like(self.wanted)
        replace, select = state.replace, state.select

        def replace_rows(rows: Tensor, *arguments: Any) -> None:
            self.wanted[rows] = torch.tensor([next(self.waiting) for _ in rows])
            self.age[rows] = 0
            replace(rows, *arguments)

        def select_rows(rows: Tensor) -> None:
            self.wanted, self.age = self.wanted[rows], self.age[rows]
            select(rows)

        state.replace, state.select = replace_rows, select_rows  # type: ignore[method-assign]
        return state

    def step(self, tokens: Tensor, state: DecodeState) -> Tensor:
        self.age += 1
        return self.decoder.step(tokens, state)

    def head(self, hidden: Tensor) -> Tensor:
        logits = self.decoder.head(hidden)
        logits[:, EOS] = torch.where(self.age >= self.wanted, torch.inf, -torch.inf)
        return logits


def memory(side: str, shape: str, case: str, dtype: torch.dtype) -> None:
    """Prints the peak memory of one side in megabytes (Linux)."""
    batch, beam = CASES[case]
    ours, theirs = models(shape, batch * beam, dtype)
    images = torch.randn(batch, 3, SHAPES[shape]["image"], SHAPES[shape]["image"])
    Path("/proc/self/clear_refs").write_text("5")  # resets the peak
    before = _status("VmRSS")
    if side == "ours":
        run_ours(ours.decoder, ours, images, Decoding(beam=beam, max_tokens=TOKENS - 1), eos=-1, rows=batch)
    else:
        theirs.generate(images, max_new_tokens=TOKENS, num_beams=beam, do_sample=False)
    weights = sum(p.numel() for p in theirs.parameters()) * (dtype if side == "ours" else torch.float32).itemsize
    print((_status("VmHWM") - before) / 1024 + weights / 2**20)


def _status(name: str) -> int:
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith(name))


def measured_memory(shape: str, case: str, precision: str) -> dict[str, float]:
    """Returns the megabytes of both sides, each measured in its own process."""
    megabytes = {}
    for side in ("ours", "peer"):
        command = [sys.executable, __file__, "--precision", precision, "--memory", side, shape, case]
        done = subprocess.run(command, capture_output=True, text=True, check=True)
        megabytes[f"{side}_mb"] = float(done.stdout.split()[-1])
    return megabytes


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shapes", nargs="+", choices=list(SHAPES), default=list(SHAPES))
    parser.add_argument("--cases", nargs="+", choices=[*CASES, "queue"], default=[*CASES, "queue"])
    parser.add_argument("--precision", choices=list(DTYPES), default="fp32", help="Of ours.")
    parser.add_argument("--onnx", action="store_true", help="ONNX Runtime too, in float32")
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--queue", type=int, default=512, help="Images of the queue.")
    parser.add_argument("--out")
    parser.add_argument("--memory", nargs=3, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.memory:
        memory(*args.memory, DTYPES[args.precision])
        return
    results = {}
    print(
        f"{'':<34}{'ours ms':>10}{'peer ms':>10}{'ratio':>8}{'min':>8}{'max':>8}"
        f"{'same':>10}{'ours MB':>9}{'peer MB':>9}"
    )
    for shape in args.shapes:
        for case in args.cases:
            if case == "queue":
                rows = queue(shape, args.queue, DTYPES[args.precision], rounds=min(args.rounds, 3))
            else:
                rows = compare_fixed_lengths(
                    shape, *CASES[case], DTYPES[args.precision], rounds=args.rounds, onnx=args.onnx
                )
                rows["transformers"] |= measured_memory(shape, case, args.precision)
            results[f"{shape}, {case}"] = rows
            for peer, row in rows.items():
                cells = [f"{row['ours_s'] * 1e3:>10.1f}{row['peer_s'] * 1e3:>10.1f}"]
                cells += [f"{row[key]:>8.2f}" for key in ("ratio", "ratio_min", "ratio_max")]
                cells += [f"{row['same_captions']:>5.0f}/{row['images']:<4.0f}"]
                cells += [f"{row[key]:>9.0f}" for key in ("ours_mb", "peer_mb") if key in row]
                print(f"{f'{shape}, {case}, {peer}':<34}" + "".join(cells), flush=True)
    if args.out is not None:
        Path(args.out).write_text(json.dumps(results, indent=1) + "\n")


if __name__ == "__main__":
    main()
