"""The whole of a CLIP folder (Radford et al. 2021): both towers with their projections, for images beside texts."""

from collections.abc import Mapping
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from vlm.errors import UserError
from vlm.models.decoder import Decoder
from vlm.models.pretrained.architectures.clip_vision_model import CLIP_VISION, LAYERS
from vlm.models.pretrained.files import read_config, read_tensors
from vlm.models.pretrained.stack import Sources, Stack, layers, modules, prefixed, same, stack_sizes
from vlm.models.vit import ViT

DEFAULTS = {
    **{"hidden_size": 512, "num_attention_heads": 8, "intermediate_size": 2048},
    **{"hidden_act": "quick_gelu", "layer_norm_eps": 1e-5},
}


def sizes(config: Mapping[str, Any]) -> dict[str, Any]:
    """Sizes of the tower of texts."""
    length = config.get("max_position_embeddings", 77)
    return stack_sizes({**DEFAULTS, **config}) | {"vocab_size": config.get("vocab_size", 49408), "max_len": length}


def sources(decoder: Decoder, names: Any) -> Sources:
    embeddings = {"token_embed": "token_embedding", "positions": "position_embedding"}
    return {
        **{f"{ours}.weight": ((f"embeddings.{theirs}.weight",), same) for ours, theirs in embeddings.items()},
        **modules({"norm": "final_layer_norm"}),
        **layers(decoder.blocks, LAYERS, "encoder.layers"),
    }


CLIP_TEXT = Stack(kind=Decoder, stem="text_model.", sizes=sizes, sources=sources)
TOWERS = {"vision": CLIP_VISION, "text": CLIP_TEXT}
NO_ARGUMENTS = ("stem", "positions")  # our classes have these by default


class Clip(nn.Module):
    """Images and texts as vectors of one space, as CLIPModel computes them.

    Args:
        vision: The encoder of images, pooled by its class token.
        text: The causal encoder of texts, pooled by the token that ends one.
        dim: Width E of the space.
    Shapes:
        images (B, 3, H, W) normalised; tokens (B, L), each row with its length (B,) -> (B, E), of norm 1
    """

    def __init__(self, *, vision: ViT, text: Decoder, dim: int) -> None:
        super().__init__()
        self.vision, self.text = vision, text
        self.vision_projection = nn.Linear(vision.dim, dim, bias=False)
        self.text_projection = nn.Linear(text.token_embed.embedding_dim, dim, bias=False)

    def embed_images(self, images: Tensor) -> Tensor:
        return F.normalize(self.vision_projection(self.vision(images).states[:, 0]), dim=-1)

    def embed_texts(self, tokens: Tensor, lengths: Tensor) -> Tensor:
        """Embeddings of texts; after the end of one a row may hold anything, which no token before it sees."""
        hidden = self.text(tokens)  # (B, L, D)
        rows = torch.arange(len(tokens), device=tokens.device)
        return F.normalize(self.text_projection(hidden[rows, lengths - 1]), dim=-1)


def load_clip(folder: str) -> Clip:
    """The model of a local folder of Hugging Face's CLIPModel; of a size that its tensors have.

    Raises:
        UserError: The folder is of another model, or damaged.
    """
    config = read_config(folder)
    if config.get("model_type") != "clip" or "CLIPModel" not in (config.get("architectures") or ["CLIPModel"]):
        raise UserError(f"{folder}: holds no CLIPModel; give a folder of one, such as openai/clip-vit-base-patch32")
    try:
        with torch.device("meta"):
            towers: dict[str, Any] = {name: _tower(stack, config[f"{name}_config"]) for name, stack in TOWERS.items()}
            model = Clip(**towers, dim=config.get("projection_dim", 512))
        stored, tensors = read_tensors(folder), {}
        for name, (names, make) in _sources(model, stored).items():
            tensors[name] = make(*(stored[other] for other in names)).float()
        model.load_state_dict(tensors, assign=True)
    except UserError:
        raise
    except Exception as fault:  # a description may hold anything, and break a constructor in any way
        reason = f"no {fault}" if isinstance(fault, KeyError) else (str(fault) or type(fault).__name__).split("\n")[0]
        raise UserError(f"{folder}: its config.json and weights do not fit ({reason:.200}); fetch it again") from fault
    return model.eval()


def _tower(stack: Stack, config: Mapping[str, Any]) -> nn.Module:
    if faults := list(stack.not_ours(config)):
        raise ValueError(f"{', '.join(faults)} is none of ours")
    sizes = {name: value for name, value in stack.arguments(config).items() if name not in NO_ARGUMENTS}
    return stack.kind(**sizes)


def _sources(model: Clip, names: Mapping[str, Tensor]) -> Sources:
    tensors: Sources = {}
    for name, stack in TOWERS.items():
        tensors |= prefixed(stack.sources(getattr(model, name), names), f"{name}.", stack.stem)
    projections = (("vision_projection.weight", "visual_projection.weight"), ("text_projection.weight",) * 2)
    return tensors | {ours: ((theirs,), same) for ours, theirs in projections}
