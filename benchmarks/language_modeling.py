"""Compares training a language model at the shapes of nanoGPT's CPU run with plain steps and with Hugging Face.

    python benchmarks/language_modeling.py --text FILE [--device cuda] [--out FILE.json]

"Ours" is the whole of `python train.py experiment=shakespeare_cpu`: data, Lightning, logging, progress bar,
checkpoints. The peers are bare steps in float32: batches cut from an array in memory, cross-entropy, clipping, torch's
default AdamW. Their model is a plain GPT-2 with F.scaled_dot_product_attention, or transformers' GPT2LMHeadModel with
only sizes and dropout changed. Ours computes in float32, or in the precision of trainer=cpu, also with compile=true. On
a GPU the peers compute in bfloat16, and CUDA events are timed. Blocks of steps of both sides alternate in one process;
ratios are medians over blocks.
"""

import argparse
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path

from vlm.machine import tune

tune()  # applies to both sides
sys.path.insert(0, str(Path(__file__).parent))

import numpy as np
import torch
import torch.nn.functional as F
from interleaved import InterleavedTimer, report
from torch import Tensor, nn
from transformers import GPT2Config, GPT2LMHeadModel

from vlm.config.compose import compose
from vlm.training.run.run import Run
from vlm.training.run.train import silence_libraries

WINDOW, BATCH, DIM, HEADS, DEPTH = 64, 12, 128, 4, 4


class PlainBlock(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(DIM, bias=False), nn.LayerNorm(DIM, bias=False)
        self.qkv, self.proj = nn.Linear(DIM, 3 * DIM, bias=False), nn.Linear(DIM, DIM, bias=False)
        self.up, self.down = nn.Linear(DIM, 4 * DIM, bias=False), nn.Linear(4 * DIM, DIM, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        rows, length, _ = x.shape
        parts = self.qkv(self.norm1(x)).split(DIM, dim=2)
        q, k, v = (part.view(rows, length, HEADS, DIM // HEADS).transpose(1, 2) for part in parts)
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.proj(mixed.transpose(1, 2).contiguous().view(rows, length, DIM))
        return x + self.down(F.gelu(self.up(self.norm2(x))))


class PlainGPT(nn.Module):
    def __init__(self, vocab_size: int) -> None:
        super().__init__()
        self.tokens, self.places = nn.Embedding(vocab_size, DIM), nn.Embedding(WINDOW, DIM)
        self.blocks = nn.Sequential(*(PlainBlock() for _ in range(DEPTH)))
        self.norm = nn.LayerNorm(DIM, bias=False)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.tokens(tokens) + self.places(torch.arange(tokens.shape[1], device=tokens.device))
        return F.linear(self.norm(self.blocks(x)), self.tokens.weight)


class HuggingFace(nn.Module):
    def __init__(self, vocab_size: int) -> None:
        super().__init__()
        sizes = {"n_embd": DIM, "n_layer": DEPTH, "n_head": HEADS, "n_positions": WINDOW}
        none = {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0}
        self.model = GPT2LMHeadModel(GPT2Config(vocab_size=vocab_size, use_cache=False, **sizes, **none))

    def forward(self, tokens: Tensor) -> Tensor:
        return self.model(tokens).logits


PEERS = {"plain": PlainGPT, "GPT2LMHeadModel": HuggingFace}


def bare_step(name: str, ids: np.ndarray, vocab_size: int, device: str) -> Callable[[], None]:
    """Returns a function that takes one training step of a peer."""
    model = PEERS[name](vocab_size).to(device)
    matrices = [p for p in model.parameters() if p.ndim > 1]
    rest = [p for p in model.parameters() if p.ndim == 1]
    groups = [{"params": matrices, "weight_decay": 0.1}, {"params": rest, "weight_decay": 0.0}]
    optimizer = torch.optim.AdamW(groups, lr=1e-3, betas=(0.9, 0.99))

    def step() -> None:
        starts = torch.randint(len(ids) - WINDOW, (BATCH,))
        x = torch.stack([torch.from_numpy(ids[i : i + WINDOW].astype(np.int64)) for i in starts])
        y = torch.stack([torch.from_numpy(ids[i + 1 : i + 1 + WINDOW].astype(np.int64)) for i in starts])
        x, y = x.to(device), y.to(device)
        with torch.autocast(device, torch.bfloat16, enabled=device == "cuda"):
            loss = F.cross_entropy(model(x).view(-1, vocab_size), y.view(-1))
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)

    return step


# Variants of ours: precision, and whether its blocks are compiled.
WAYS = {"fp32": ("32-true", "null"), "default": ("null", "null"), "default, compiled": ("null", "true")}


def compare(text: str, peer: str, way: str, *, block: int, rounds: int, device: str) -> dict[str, float]:
    precision, compiled = WAYS[way]
    with tempfile.TemporaryDirectory() as runs:
        overrides = ["experiment=shakespeare_cpu", f"data.path={text}", f"runs={runs}"]
        overrides += ["trainer=gpu" if device == "cuda" else "trainer=cpu"]
        overrides += [f"trainer.precision={precision}", f"compile={compiled}"]
        config = compose([*overrides, "trainer.limit_val_batches=0", "trainer.max_steps=-1", "trainer.max_epochs=99"])
        run = Run(config)
        field = run.data.fields["text"]
        timed = InterleavedTimer(
            bare_step(peer, field.tokens("train").tokens, field.tokenizer.vocab_size, device),
            block=block,
            rounds=rounds,
            device=device,
        )
        run.trainer.callbacks.append(timed)
        run.fit()
    return timed.result()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--text", required=True)
    parser.add_argument("--block", type=int, default=50)
    parser.add_argument("--rounds", type=int, default=8)
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--out")
    args = parser.parse_args()
    silence_libraries()
    options = {"block": args.block, "rounds": args.rounds, "device": args.device}
    rows = {f"{peer}, ours {way}": compare(args.text, peer, way, **options) for peer in PEERS for way in WAYS}
    report(rows, args.out)


if __name__ == "__main__":
    main()
