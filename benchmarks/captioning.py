"""Compares training on Flickr8k from files with a straightforward Hugging Face loop, in captions a second.

    python benchmarks/captioning.py --root FOLDER [--shape S] [--precision 32-true] [--compiled] [--device cuda]
        [--out FILE.json]
    python benchmarks/captioning.py --root FOLDER --pairs 80 --rounds 19       # as many captions a step: loss curves

"Ours" is the whole of `python train.py data=flickr8k`: files, augmentation, Lightning, logging, progress bar. The peer
is VisionEncoderDecoderModel (ViT + GPT-2, no pretrained weights) on (image, caption) pairs padded to the longest of the
batch, in float32, with torch's default AdamW and a DataLoader with as many workers. Both sides have the same sizes,
photos, captions, vocabulary and AdamW settings, and with --precision 32-true the same precision; by default ours has
that of trainer=cpu. Blocks of steps of both sides alternate in one process; ratios are medians over blocks. Losses are
means over the captions that a side has learned so far. Memory is the peak of each side in its own process, above what
it held once data and model were built (Linux). On a GPU the peer computes in bfloat16, and CUDA events are timed.
"""

import argparse
import csv
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from vlm.machine import tune

tune()  # applies to both sides
sys.path.insert(0, str(Path(__file__).parent))

import torch
from interleaved import InterleavedTimer, report
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset
from transformers import GPT2Config, GPT2LMHeadModel, VisionEncoderDecoderModel, ViTConfig, ViTModel

from vlm.config.compose import compose, override
from vlm.training.run.run import Run
from vlm.training.run.train import silence_libraries

SHAPES = {
    "S": {"image_size": 96, "encoder_depth": 6, "decoder_depth": 6, "dim": 256, "num_heads": 4},
    "M": {"image_size": 224, "encoder_depth": 12, "decoder_depth": 6, "dim": 384, "num_heads": 6},
}
VOCAB, MAX_LEN, LR = 8000, 40, 3e-4


class Pairs(Dataset):
    """Pairs of an image and one of its captions; the image file is read again for every pair."""

    def __init__(self, data: Any) -> None:
        self.split = data.split("train")
        self.tokenizer, self.preprocess = data.fields["captions"].tokenizer, data.fields["images"].preprocess
        records = enumerate(self.split.records())
        self.pairs = [(index, caption) for index, record in records for caption in record["captions"]]

    def __len__(self) -> int:
        return len(self.pairs)

    def __getitem__(self, at: int) -> tuple[Tensor, Tensor]:
        index, caption = self.pairs[at]
        pixels = self.preprocess.normalize(self.preprocess(self.split.record(index).image()))
        body = self.tokenizer.encode(caption)[: MAX_LEN - 2]
        return pixels, torch.tensor([self.tokenizer.bos_id, *body, self.tokenizer.eos_id])


def collate(rows: list[tuple[Tensor, Tensor]]) -> tuple[Tensor, Tensor]:
    return torch.stack([pixels for pixels, _ in rows]), nn.utils.rnn.pad_sequence([ids for _, ids in rows], True)


def peer_model(shape: dict[str, int], vocab_size: int = VOCAB) -> VisionEncoderDecoderModel:
    dim, heads = shape["dim"], shape["num_heads"]
    encoder = ViTConfig(
        hidden_size=dim,
        num_hidden_layers=shape["encoder_depth"],
        num_attention_heads=heads,
        intermediate_size=4 * dim,
        image_size=shape["image_size"],
        patch_size=16,
    )
    decoder = GPT2Config(
        vocab_size=vocab_size,
        n_positions=MAX_LEN,
        n_embd=dim,
        n_layer=shape["decoder_depth"],
        n_head=heads,
        add_cross_attention=True,
        is_decoder=True,
    )
    model = VisionEncoderDecoderModel(encoder=ViTModel(encoder), decoder=GPT2LMHeadModel(decoder))
    model.config.pad_token_id, model.config.decoder_start_token_id = 0, 1
    return model


def peer_loss(
    model: nn.Module, pixels: Tensor, ids: Tensor, device: str = "cpu", *, bfloat16: bool, reduction: str = "mean"
) -> Tensor:
    """Returns the cross-entropy of captions, which have a begin and an end token and are padded with 0."""
    labels = ids[:, 1:].masked_fill(ids[:, 1:] == 0, -100)
    with torch.autocast(device, torch.bfloat16, enabled=bfloat16):
        logits = model(pixel_values=pixels, decoder_input_ids=ids[:, :-1]).logits
    return nn.functional.cross_entropy(logits.flatten(0, 1).float(), labels.flatten(), reduction=reduction)


class Peer:
    """Takes training steps of the peer and keeps their losses."""

    def __init__(
        self, data: Any, shape: dict[str, int], batch: int, device: str = "cpu", *, compiled: bool = False
    ) -> None:
        self.batch, self.device = batch, device
        self.losses: list[Tensor] = []
        self.model = peer_model(shape).to(device)
        if compiled:
            self.model.forward = torch.compile(self.model.forward, dynamic=True)  # captions have many lengths
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=LR)
        self.batches = self._read(
            DataLoader(
                Pairs(data), batch, shuffle=True, collate_fn=collate, num_workers=data.num_workers, drop_last=True
            )
        )

    @staticmethod
    def _read(loader: DataLoader) -> Iterator[tuple[Tensor, Tensor]]:
        while True:
            yield from loader

    def step(self) -> None:
        pixels, ids = (part.to(self.device) for part in next(self.batches))
        loss = peer_loss(self.model, pixels, ids, self.device, bfloat16=self.device == "cuda")
        loss.backward()
        nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
        self.losses.append(loss.detach())


def config_of(root: str, name: str, images: int, precision: str, runs: str, device: str = "cpu") -> dict[str, Any]:
    shape = SHAPES[name]
    overrides = ["data=flickr8k", f"data.root={root}", f"data.image_size={shape['image_size']}", f"runs={runs}"]
    overrides += ["model=small", *(f"model.size.{key}={value}" for key, value in shape.items() if key != "image_size")]
    overrides += [f"data.max_len={MAX_LEN}", f"data.batch_size={images}", f"optim.lr={LR}"]
    overrides += [f"tokenizer.vocab_size={VOCAB}", "trainer.limit_val_batches=0", "trainer.max_epochs=99"]
    overrides += ["trainer=gpu"] if device == "cuda" else ["trainer=cpu", "data.num_workers=1"]
    overrides += [f"trainer.precision={precision}"]
    overrides += ["schedule=constant", "schedule.warmup=0", "optim.betas=[0.9,0.999]", "optim.weight_decay=0.01"]
    return compose([*overrides, "model.size.dropout=0.1", "trainer.log_every_n_steps=1"])


def compare(
    root: str,
    name: str,
    *,
    images: int,
    pairs: int,
    precision: str,
    block: int,
    rounds: int,
    device: str,
    compiled: bool,
) -> dict[str, Any]:
    with tempfile.TemporaryDirectory() as runs:
        run = Run(config_of(root, name, images, precision, runs, device))
        peer = Peer(run.data, SHAPES[name], pairs, device, compiled=compiled)
        captions = len(run.data.split("train").record(0)["captions"]) * images
        timed = InterleavedTimer(peer.step, block=block, rounds=rounds, units=(captions, pairs), device=device)
        run.trainer.callbacks.append(timed)
        run.fit()
        with open(run.folder / "metrics.csv", newline="") as file:
            losses = [float(row["train/loss"]) for row in csv.DictReader(file) if row.get("train/loss")]
    if captions == pairs:
        curves(losses, [float(loss) for loss in peer.losses], captions)
    if device == "cuda" or compiled:
        return timed.result()
    return timed.result() | {
        f"{side}_mb": memory(root, name, side, images, pairs, precision) for side in ("ours", "peer")
    }


def curves(ours: list[float], theirs: list[float], captions: int, parts: int = 10) -> None:
    """Prints the mean loss of both sides over each tenth of the captions that they learned."""
    length = min(len(ours), len(theirs)) // parts
    print(f"{'captions':>10}{'ours':>10}{'peer':>10}")
    for at in range(0, parts * length, length):
        means = (statistics.mean(losses[at : at + length]) for losses in (ours, theirs))
        print(f"{(at + length) * captions:>10}" + "".join(f"{mean:>10.3f}" for mean in means))


def memory(root: str, name: str, side: str, images: int, pairs: int, precision: str) -> float:
    """Returns the megabytes that some steps of one side need, measured in a separate process."""
    arguments = ["--root", root, "--shape", name, "--images", str(images), "--pairs", str(pairs), "--memory", side]
    arguments += ["--precision", precision]
    done = subprocess.run([sys.executable, __file__, *arguments], capture_output=True, text=True, check=True)
    return float(done.stdout.split()[-1])


def print_memory(root: str, name: str, side: str, images: int, pairs: int, precision: str, steps: int = 4) -> None:
    with tempfile.TemporaryDirectory() as runs:
        run = Run(override(config_of(root, name, images, precision, runs).tree, [f"trainer.max_steps={steps}"]))
        peer = Peer(run.data, SHAPES[name], pairs) if side == "peer" else None
        Path("/proc/self/clear_refs").write_text("5")  # resets the peak
        before = _status("VmRSS")
        if peer is None:
            run.fit()
        else:
            for _ in range(steps):
                peer.step()
        print((_status("VmHWM") - before) / 1024)


def _status(name: str) -> int:
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith(name))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--root", required=True)
    parser.add_argument("--shape", choices=SHAPES, default="S")
    parser.add_argument("--images", type=int, default=16, help="images of our batch, each with all its captions")
    parser.add_argument("--pairs", type=int, default=32, help="pairs of the peer's batch")
    parser.add_argument("--precision", default="null", help="Lightning's name; null: what trainer=cpu takes")
    parser.add_argument("--block", type=int, default=5)
    parser.add_argument("--rounds", type=int, default=8)
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--compiled", action="store_true", help="the peer's forward pass by torch.compile")
    parser.add_argument("--out")
    parser.add_argument("--memory", choices=("ours", "peer"), help=argparse.SUPPRESS)
    args = parser.parse_args()
    silence_libraries()
    if args.memory:
        print_memory(args.root, args.shape, args.memory, args.images, args.pairs, args.precision)
        return
    options = {
        "images": args.images,
        "pairs": args.pairs,
        "precision": args.precision,
        "block": args.block,
        "rounds": args.rounds,
        "device": args.device,
        "compiled": args.compiled,
    }
    row = compare(args.root, args.shape, **options)
    report({f"shape {args.shape}, a caption": row}, args.out)
    if "ours_mb" in row:
        print(f"peak memory: ours {row['ours_mb']:.0f} MB, peer {row['peer_mb']:.0f} MB")


if __name__ == "__main__":
    main()
