"""How many floating-point operations a training step of a model is, counted from its sizes.

Only matrix products count, a multiplication and an addition each, as in the count that model FLOP utilisation is
defined by (Chowdhery et al. 2022, "PaLM", appendix B): what a model has to compute, whatever a program does beside it.
Attention counts whole, also where a mask hides half of it, and the backward pass counts twice the forward one.
"""

from dataclasses import dataclass
from typing import cast

import torch
from torch import Tensor, nn
from torch.utils.flop_counter import FlopCounterMode

from vlm.models.classifier import Classifier
from vlm.models.context import Context
from vlm.models.decoder import Decoder
from vlm.models.encoder_decoder import VisionLanguageModel
from vlm.models.frozen_features import frozen_part
from vlm.models.timm_encoder import TimmEncoder
from vlm.models.vit import ViT
from vlm.nn.attention import CrossAttention, SelfAttention


@dataclass(frozen=True)
class Work:
    """What a batch is to a model.

    Args:
        images: Images that are encoded.
        rows: Rows of text, B.
        length: Tokens of a row, L, padding included.
        kept: Whether the features of the images were kept, and are only projected, if that.
    """

    images: int = 0
    rows: int = 0
    length: int = 0
    kept: bool = False


class ModelFlop:
    """Counts the operations of training steps of one model; made before the model is sharded.

    Args:
        model: A VisionLanguageModel, a Classifier or a Decoder.
        image_size: Side of its images, in pixels; 0 where it reads none.
    Raises:
        TypeError: The model is of another kind.
    """

    def __init__(self, model: nn.Module, *, image_size: int = 0) -> None:
        if not isinstance(model, VisionLanguageModel | Classifier | Decoder):
            raise TypeError(f"the operations of a {type(model).__name__} are not counted")
        self.image = self.projection = self.states = self.pool = 0
        self.token = self.pair = self.state = self.context_pair = 0
        self.learned = 0  # of an image's operations, those that have a backward pass: none has below what learns
        if not isinstance(model, Decoder):
            self.image, self.states = encoder_flop(model.encoder, image_size)
            if isinstance(model.encoder, TimmEncoder):
                self.projection = 2 * self.states * model.encoder.proj.weight.numel()
            if _learns(frozen_part(model.encoder)):
                self.learned = self.image
            elif _learns(model.encoder):
                self.learned = self.projection
        if isinstance(model, Classifier):
            self.head = 2 * model.head.weight.numel()
            if model.attention_pool is not None:
                self._add_cross(model.attention_pool.attn)
                self.pool = self.token + self.states * (self.state + self.context_pair)
            return
        decoder = model if isinstance(model, Decoder) else model.decoder
        self.head = 2 * decoder.token_embed.weight.numel()
        for block in decoder._blocks():
            token, pair = block_flop(block)
            self.token, self.pair = self.token + token, self.pair + pair
            if block.cross_attn is not None:
                self._add_cross(block.cross_attn)

    def _add_cross(self, attn: CrossAttention) -> None:
        self.token += 2 * (attn.q.weight.numel() + attn.proj.weight.numel())
        self.state += 2 * attn.kv.weight.numel()
        self.context_pair += _mixing(attn)

    def forward(self, work: Work, predicted: float) -> dict[str, float]:
        """Operations of a forward pass, by part of the model.

        Args:
            predicted: Positions that go through the head: tokens, or images of a classifier.
        """
        tokens = work.rows * work.length
        text = tokens * (self.token + work.length * self.pair + self.states * self.context_pair)
        context = work.images * self.states * self.state if work.rows else 0
        return {
            "encoder": float(work.images * (self.projection if work.kept else self.image)),
            "decoder": float(text + context + work.images * self.pool),
            "head": float(predicted * self.head),
        }

    def training(self, work: Work, predicted: float) -> float:
        """Operations of a training step's forward and backward passes."""
        found = self.forward(work, predicted)
        encoder = found["encoder"] + 2 * work.images * self.learned
        return encoder + 3 * (found["decoder"] + found["head"])


def _learns(part: nn.Module) -> bool:
    return any(parameter.requires_grad for parameter in part.parameters())


def encoder_flop(encoder: nn.Module, image_size: int) -> tuple[int, int]:
    """Operations of encoding one image, and how many states it becomes."""
    if not isinstance(encoder, ViT):
        count, context = measured(encoder, image_size)
        return count, cast(Context, context).states.shape[1]
    count, patches = measured(encoder.patch_embed, image_size)
    states = cast(Tensor, patches)[0, 0].numel() + (encoder.class_token is not None)
    for block in encoder.blocks:
        token, pair = block_flop(block)
        count += states * (token + states * pair)
    return count, states


def measured(module: nn.Module, image_size: int) -> tuple[int, Tensor | Context]:
    """Operations of a module that reads one image, as torch counts them, and what it gives; nothing is computed."""
    tensors = {name: t.detach().to("meta") for name, t in [*module.named_parameters(), *module.named_buffers()]}
    modes = [(part, part.training) for part in module.modules()]
    module.eval()
    try:
        with FlopCounterMode(display=False) as counter, torch.no_grad():
            image = torch.empty(1, 3, image_size, image_size, device="meta")
            given = torch.func.functional_call(module, tensors, (image,))
    finally:
        for part, training in modes:  # each its own: a frozen part of a module that learns does not train
            part.training = training
    return counter.get_total_flops(), given


def block_flop(block: nn.Module) -> tuple[int, int]:
    """Operations of a block's self-attention and MLP: for each token, and for each pair of a query and a key."""
    attn = cast(SelfAttention, block.attn)
    linear = [m for part in (attn, cast(nn.Module, block.mlp)) for m in part.modules() if isinstance(m, nn.Linear)]
    return 2 * sum(layer.weight.numel() for layer in linear), _mixing(attn)


def _mixing(attn: SelfAttention | CrossAttention) -> int:
    """Of a pair in all heads: the product of query and key, and that of its weight with the value."""
    return 4 * attn.num_heads * attn.head_dim
