"""Small random models with adapters, for tests and for the comparison with the peft library."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
import transformers as t
from hugging import saved_decoder, saved_gpt2
from image_text import saved_image_text

from vlm.checkpoint.file import write
from vlm.checkpoint.load import describe_bases, load_model, read
from vlm.models.pretrained.load import open_folder
from vlm.nn.lora import LoRA

NAMES = ("llama", "gpt2", "smolvlm", "llava_clip")
PROJECTIONS = ["qkv", "q", "kv", "proj", "fc1", "fc2"]
RANK, ALPHA = 2, 3.0
# Parts of ours that are trained without adapters: an output head and a norm, a tied embedding, and projectors.
SAVED = {
    "llama": ("vocabulary_head", "norm"),
    "gpt2": ("token_embed",),
    "smolvlm": ("encoder.projector",),
    "llava_clip": ("encoder.projector",),
}


def save_base(name: str, folder: Path) -> None:
    """Writes a random model in Hugging Face's format."""
    torch.manual_seed(5)
    if name == "gpt2":
        saved_gpt2(folder)
    elif name in ("llama", "qwen3"):
        saved_decoder(folder, name)
    else:
        saved_image_text(folder, name)


def load_theirs(folder: Path) -> Any:
    return getattr(t, open_folder(folder).origin).from_pretrained(folder).eval()


def save_adapters(base: Path, path: Path, saved: Sequence[str] = ()) -> None:
    """Writes a checkpoint of ours with random adapters of a base.

    Args:
        saved: Parts that were trained without adapters.
    """
    loaded = read(base)
    model = load_model(loaded)
    bases, _ = describe_bases(model, {"": str(base)})
    LoRA(rank=RANK, alpha=ALPHA, projections=PROJECTIONS).adapt(model, without=saved)
    torch.manual_seed(6)
    kept = {}
    for name, tensor in model.state_dict().items():
        if "lora_" in name:
            kept[f"model.{name}"] = torch.randn(tensor.shape) * 0.3
        elif name.startswith(tuple(f"{part}." for part in saved)):
            kept[f"model.{name}"] = tensor * 1.25
    about = dict(loaded["vlm"]) | {"base_class": open_folder(base).origin}
    about.pop("origin", None)
    about["adapters"] = {"scale": ALPHA / RANK, "layers": sum("lora_a" in name for name in kept), "base": bases}
    write(path, {"format": 2, "vlm": about, "state_dict": kept, "global_step": 0, "epoch": -1})


def their_inputs(model: Any) -> dict[str, torch.Tensor]:
    """Returns a text, and an image for models that read images."""
    torch.manual_seed(7)
    ids = torch.randint(60, 250, (1, 12))
    if not hasattr(model.config, "vision_config"):
        return {"input_ids": ids}
    side = model.config.vision_config.image_size
    pixels = torch.randn(1, 3, side, side)
    is_llava = model.config.model_type == "llava"
    states = model.get_image_features(pixels if is_llava else pixels[None])
    states = getattr(states, "pooler_output", states)
    count = sum(part.reshape(-1, part.shape[-1]).shape[0] for part in states)
    image = torch.full((1, count), model.config.image_token_id)
    return {"input_ids": torch.cat([ids[:, :2], image, ids], 1), "pixel_values": pixels if is_llava else pixels[None]}


@torch.no_grad()
def last_logits(model: Any) -> torch.Tensor:
    """Returns their logits of the last token, (vocabulary,)."""
    return model(**their_inputs(model)).logits[0, -1]


@torch.no_grad()
def our_logits(model: torch.nn.Module, theirs: Any) -> torch.Tensor:
    """Returns the logits of the last token of a model of ours, for the inputs of `their_inputs`."""
    from vlm.models.context import PLACE, interleave_states

    given = their_inputs(theirs)
    if "pixel_values" not in given:
        return model.head(model(given["input_ids"]))[0, -1]
    tokens = [PLACE if id == theirs.config.image_token_id else id for id in given["input_ids"][0].tolist()]
    pixels = given["pixel_values"].reshape(-1, *given["pixel_values"].shape[-3:])
    states = model.encode(pixels).states.flatten(0, 1)
    context = interleave_states([tokens], states)
    return model.head(model.decoder(torch.tensor([tokens[-1:]]), None, context))[0, -1]
