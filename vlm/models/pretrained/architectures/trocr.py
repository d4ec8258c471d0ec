"""The decoder of TrOCR (Li et al. 2021) for lines of text: RoBERTa's or MiniLM's, with cross-attention."""

from typing import Any

import torch.nn.functional as F

from vlm.models.decoder import Decoder
from vlm.models.pretrained.architecture import Architecture, Model, spec_of
from vlm.models.pretrained.architectures import marian
from vlm.models.pretrained.fields import Fields, flag, integer
from vlm.models.pretrained.stack import Part, Stack, Weight, layers

BEFORE = 2  # number of learned positions that precede the first token's


def positions_and_head(sizes: dict[str, Any], config: Fields) -> dict[str, Any]:
    """Arguments for sinusoids if positions are not learned, and for an untied head if there is one."""
    dim = sizes["dim"]
    found: dict[str, Any] = {"embed_scale": marian.scaled(sizes, config)}
    if not config.read(flag("use_learned_position_embeddings", True)):
        first = config.read(integer("pad_token_id", 1, low=0)) + 1
        # As in tensor2tensor, the last wave is the longest: 10,000 ** (-2 i / (D - 2)).
        found["positions"] = spec_of("SplitSinusoids", dim=dim, base=10_000.0 ** (dim / (dim - 2)), first=first)
    if not config.read(flag("tie_word_embeddings", True)):
        found["vocabulary_head"] = spec_of("VocabularyHead", dim=dim, vocab_size=sizes["vocab_size"], tied=False)
    return found


TROCR = Stack(
    kind=Decoder,
    model_type="trocr",
    prefix="model.decoder.",
    sizes={
        **marian.sizes("decoder", vocab_size=50265, max_len=512),
        "embed_norm": flag("layernorm_embedding", True),
    },
    more=positions_and_head,
    names={
        "token_embed.weight": "embed_tokens.weight",
        "positions.weight": Weight(
            ("embed_positions.weight",), lambda rows: rows[BEFORE:], lambda rows: F.pad(rows, (0, 0, BEFORE, 0))
        ),
        "embed_norm": "layernorm_embedding",
        **layers(marian.LAYERS, "layers"),
    },
    unused=("embed_positions._float_tensor",),  # shows older versions the type of the model
    neutral_keys=("add_cross_attention", "cross_attention_hidden_size", "is_decoder"),  # shown by the tensors
    aliases={
        "hidden_size": "d_model",
        "num_attention_heads": "decoder_attention_heads",
        "num_hidden_layers": "decoder_layers",
    },
    extra=layers(marian.CROSS_LAYERS, "layers"),
    head={
        "token_embed.weight": "model.decoder.embed_tokens.weight|output_projection.weight",
        "vocabulary_head.own.weight": "output_projection.weight",
    },
)
TROCR_ARCHITECTURE = Architecture(
    parts=lambda config: {"decoder": Part(TROCR, config)},
    models={"TrOCRForCausalLM": Model("language_modeling", lambda config, parts: parts["decoder"])},
)
