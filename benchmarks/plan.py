"""Calculates what training on many images would take, from formulas and stated assumptions alone.

    python benchmarks/plan.py [--images 1e9] [--gpus 64] [--mfu 0.4] [--peak 989e12] ...

Nothing is measured. Operations are counted by vlm.models.flop.
"""

import argparse

from vlm.models.decoder import Decoder
from vlm.models.encoder_decoder import VisionLanguageModel
from vlm.models.flop import Work, model_flop
from vlm.models.vit import ViT

# Width, heads, layers of encoder and decoder: shape M of the benchmarks, model=base, and one of the sizes of ViT-L.
MODELS = {"M": (384, 6, 12, 6), "base": (768, 12, 12, 12), "large": (1024, 16, 24, 24)}


def build(name: str, args: argparse.Namespace) -> VisionLanguageModel:
    dim, heads, encoder, decoder = MODELS[name]
    layers = {"dim": dim, "num_heads": heads}
    return VisionLanguageModel(
        encoder=ViT(image_size=args.image_size, patch_size=16, depth=encoder, **layers),
        decoder=Decoder(vocab_size=args.vocab, max_len=64, depth=decoder, context_dim=dim, **layers),
    )


def plan(name: str, args: argparse.Namespace) -> dict[str, str]:
    """Returns the figures of a model by their label in the table; docs/scaling.md has the formulas."""
    model = build(name, args)
    parameters = sum(p.numel() for p in model.parameters())
    # Parameters applied to each state of an image: the encoder, and the keys and values of cross-attention.
    named = model.named_parameters()
    of_image = sum(p.numel() for key, p in named if key.startswith("encoder") or ".cross_attn.kv." in key)
    states = (args.image_size // 16) ** 2
    length = args.captions * args.tokens
    predicted = args.captions * (args.tokens - 1)
    per_image = model_flop(model, image_size=args.image_size).training(Work(1, 1, length), predicted)
    total = per_image * args.images * args.epochs
    speed = args.gpus * args.peak * args.mfu  # FLOP/s
    per_gpu = args.batch / args.gpus
    step = args.batch * per_image / speed  # seconds
    share = (args.gpus - 1) / args.gpus
    all_reduce = 2 * share * 4 * parameters  # bytes: gradients in 32 bits, by a ring
    fsdp = share * (2 * 4 + 4) * parameters  # bytes: weights are gathered twice, gradients scattered once
    reading = args.batch / step * args.kilobytes * 1e3  # bytes a second, all machines
    return {
        "parameters": f"{parameters / 1e6:,.0f} million",
        "FLOP an image with its captions": f"{per_image:.3g}",
        "by hand, without attention": f"{6 * (of_image * states + (parameters - of_image) * length):.3g}",
        "FLOP in all": f"{total:.3g}",
        "hours": f"{total / speed / 3600:,.1f}",
        "images a second, a GPU": f"{per_gpu / step:,.0f}",
        "step": f"{1e3 * step:,.0f} ms",
        "weights, gradients, moments: whole, sharded": f"{16 * parameters / 1e9:.2f} GB, "
        f"{16 * parameters / args.gpus / 1e9:.2f} GB",
        "all-reduce a step, a GPU (ddp)": f"{all_reduce / 1e9:.2f} GB, {1e3 * all_reduce / args.network:,.0f} ms",
        "gathers and scatter a step, a GPU (fsdp)": f"{fsdp / 1e9:.2f} GB, {1e3 * fsdp / args.network:,.0f} ms",
        "shards read, all machines": f"{reading / 1e9:.2f} GB/s",
        "cores that decode, a GPU": f"{per_gpu / step / args.decoded:,.1f}",
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--images", type=float, default=1e9)
    parser.add_argument("--epochs", type=float, default=1)
    parser.add_argument("--gpus", type=int, default=64)
    parser.add_argument("--batch", type=int, default=8192, help="images of a step, all GPUs")
    parser.add_argument("--mfu", type=float, default=0.4, help="share of the peak that is reached: an assumption")
    parser.add_argument("--peak", type=float, default=989e12, help="FLOP/s of a GPU, dense, 16 bits")
    parser.add_argument("--network", type=float, default=50e9, help="bytes a second of a GPU to other machines")
    parser.add_argument("--image-size", type=int, default=224)
    parser.add_argument("--captions", type=int, default=1, help="of an image")
    parser.add_argument("--tokens", type=int, default=32, help="of a caption, with its begin and end")
    parser.add_argument("--vocab", type=int, default=32000)
    parser.add_argument("--kilobytes", type=float, default=30, help="of an image's JPEG in a shard")
    parser.add_argument("--shard", type=int, default=10_000, help="images of a shard")
    parser.add_argument("--decoded", type=float, default=500, help="images a second that a core decodes: an assumption")
    args = parser.parse_args()
    plans = {name: plan(name, args) for name in MODELS}
    member = args.kilobytes * 1e3 + 1792  # image and text: two headers of 512 bytes, and padding to multiples of 512
    size = args.images * member
    print(f"{args.images:.3g} images: {size / 1e12:,.1f} TB in {args.images / args.shard:,.0f} shards of ", end="")
    print(f"{args.shard * member / 1e6:,.0f} MB; {args.gpus} GPUs, {args.batch} images a step\n")
    print("| | " + " | ".join(MODELS) + " |\n|---|" + "---|" * len(MODELS))
    for line in plans["M"]:
        print(f"| {line} | " + " | ".join(plans[name][line] for name in MODELS) + " |")


if __name__ == "__main__":
    main()
