"""Attention of a captioner: the decoder's for each word, and the encoder's for each head."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from vlm.data.images.image import Preprocess
from vlm.data.text.tokenizer import Tokenizer
from vlm.inference.predictor import normalize_pixels
from vlm.inference.writing import split_words
from vlm.models.encoder_decoder import VisionLanguageModel
from vlm.models.timm_encoder import TimmEncoder
from vlm.models.vit import ViT
from vlm.nn.attention import SelfAttention, record_attention
from vlm.nn.image_size import grid_of

Map = tuple[str, np.ndarray]


@dataclass
class Attention:
    """Maps (rows, columns) that sum to 1; a list is empty if the model's layers do not offer its kind.

    Args:
        words: For each word, the attention of the decoder's last layer when it was written, averaged over heads (Xu et
            al. 2015, figure 5).
        heads: For each head of the encoder's last layer, the attention of the class token (Caron et al. 2021, figure
            1); without a class token, the mean attention of all patches.
    """

    words: list[Map]
    heads: list[Map]


def caption_word_maps(
    model: VisionLanguageModel,
    tokenizer: Tokenizer,
    preprocess: Preprocess,
    pixels: Tensor,
    caption: str,
    language: str | None = None,
) -> list[Map]:
    """Returns the `Attention.words` of a caption, given only its text and language.

    Args:
        pixels: The image as the model reads it, uint8 (3, H, W).
        language: As in `Tokenizer.begin`.
    """
    # An encoded caption may have more tokens than it was written with.
    tokens = [*tokenizer.begin(language), *tokenizer.encode_written(caption)][: model.decoder.max_len]
    return read_attention(model, tokenizer, preprocess, pixels, tokens).words


@torch.no_grad()
def read_attention(
    model: VisionLanguageModel, tokenizer: Tokenizer, preprocess: Preprocess, pixels: Tensor, tokens: Sequence[int]
) -> Attention:
    """Runs the model on an image and its caption again, and records its attention.

    Args:
        pixels: The image as the model reads it, uint8 (3, H, W).
        tokens: The caption, without begin and end; at most as many as the decoder's positions.
    """
    # A token is predicted by the one before it, so the first token's query is the begin token.
    row = torch.tensor([[tokenizer.bos_id, *tokens[:-1]]], device=pixels.device)
    training = model.training
    with record_encoder_attention(model.encoder) as recorded_weights:
        context = model.eval().encode(normalize_pixels(model, preprocess, pixels[None]))
    decoder_weights = model.decoder.attention(row, context)  # (1, L, S)
    model.train(training)
    prefix_tokens = count_prefix_tokens(model.encoder)
    words: list[Map] = []
    size = pixels.shape[-2:]
    if decoder_weights is not None and tokens:
        grids = _reshape_to_grids(decoder_weights[0, -len(tokens) :], prefix_tokens, size)
        words = (
            []
            if grids is None
            else [(word, _normalize(grids[at].mean(0))) for word, at in split_words(tokens, tokenizer)]
        )
    return Attention(
        words, _head_maps(recorded_weights[-1][0], model.encoder, prefix_tokens, size) if recorded_weights else []
    )


def count_prefix_tokens(encoder: nn.Module) -> int | None:
    """Number of an encoder's states before the grid of patches: its class token, its registers.

    None if unknown: one state is then taken for a class token if the others form a grid.
    """
    if isinstance(encoder, ViT):
        return int(encoder.class_token is not None)
    return getattr(encoder.backbone, "num_prefix_tokens", 0) if isinstance(encoder, TimmEncoder) else None


def has_class_token(encoder: nn.Module) -> bool:
    if isinstance(encoder, TimmEncoder):
        return getattr(encoder.backbone, "cls_token", None) is not None
    return getattr(encoder, "class_token", None) is not None


@contextmanager
def record_encoder_attention(encoder: nn.Module) -> Iterator[list[Tensor]]:
    """Context that records the attention weights (B, N, S, S) of an encoder's last layer; empty if it has none."""
    backbone = encoder.backbone if isinstance(encoder, TimmEncoder) else encoder
    blocks = getattr(backbone, "blocks", None)
    layer = getattr(blocks[-1], "attn", None) if blocks is not None and len(blocks) else None
    if isinstance(layer, SelfAttention):
        with record_attention(layer) as records:
            yield records[0]
    elif hasattr(layer, "fused_attn") and isinstance(getattr(layer, "attn_drop", None), nn.Module):
        with _record_timm_attention(layer) as record:
            yield record
    else:
        yield []


@contextmanager
def _record_timm_attention(layer: Any) -> Iterator[list[Tensor]]:
    """timm exposes the weights only without fused attention, where they pass through a dropout."""
    record: list[Tensor] = []
    fused, layer.fused_attn = layer.fused_attn, False
    hook = layer.attn_drop.register_forward_hook(lambda module, inputs, output: record.append(inputs[0].detach()))
    try:
        yield record
    finally:
        hook.remove()
        layer.fused_attn = fused


def _head_maps(weights: Tensor, encoder: nn.Module, prefix_tokens: int | None, size: Sequence[int]) -> list[Map]:
    """weights (N, S, S)"""
    by_class = has_class_token(encoder)
    grids = _reshape_to_grids(
        weights[:, 0] if by_class else weights[:, prefix_tokens or 0 :].mean(1), prefix_tokens, size
    )
    return [] if grids is None else [(f"head {n}", _normalize(grid)) for n, grid in enumerate(grids, start=1)]


def _reshape_to_grids(weights: Tensor, prefix_tokens: int | None, size: Sequence[int]) -> np.ndarray | None:
    """Reshapes weights (L, S) over the encoder's states to maps (L, rows, columns); None if the states form no grid.

    Args:
        size: Height and width of the image.
    """
    height, width = size
    for first in (0, 1) if prefix_tokens is None else (prefix_tokens,):
        if grid := grid_of(weights.shape[-1] - first, (height, width)):
            return weights[:, first:].float().cpu().numpy().reshape(-1, *grid)
    return None


def _normalize(weights: np.ndarray) -> np.ndarray:
    return weights / max(float(weights.sum()), 1e-12)


@torch.no_grad()
def list_missing_maps(model: VisionLanguageModel, images: Tensor) -> list[str]:
    """Returns lines that say which attention maps a model does not offer.

    Shapes:
        images (1, 3, H, W), any that the model can read
    """
    missing, prefix_tokens = [], count_prefix_tokens(model.encoder)
    with record_encoder_attention(model.encoder) as recorded_weights:
        context = model.encode(images)
    decoder_weights = model.decoder.attention(torch.zeros(1, 1, dtype=torch.long, device=images.device), context)
    if decoder_weights is None:
        missing.append("the decoder has no attention over the image, so there are no word maps")
    elif _reshape_to_grids(decoder_weights[0], prefix_tokens, images.shape[-2:]) is None:
        missing.append("the encoder's states do not form a grid, so there are no word maps")
    if not recorded_weights or not _head_maps(recorded_weights[-1][0], model.encoder, prefix_tokens, images.shape[-2:]):
        missing.append("the encoder's attention cannot be read, so there are no head maps")
    return missing
