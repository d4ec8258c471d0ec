"""BLIP (Li et al. 2022), the captioner: a ViT, and a decoder laid out as BERT's that cross-attends to it."""

from collections.abc import Mapping
from typing import Any

import torch

from vlm.models.decoder import Decoder
from vlm.models.pretrained.architecture import Architecture, Model
from vlm.models.pretrained.architectures import bert, vit
from vlm.models.pretrained.specs import captioner, part_of
from vlm.models.pretrained.stack import Names, Part, Sources, Stack, Table, layers, modules
from vlm.models.vit import ViT

VISION_LAYERS: Table = {
    "norm1": "layer_norm1",
    "attn.qkv": "self_attn.qkv",
    "attn.proj": "self_attn.projection",
    "norm2": "layer_norm2",
    "mlp.fc1": "mlp.fc1",
    "mlp.fc2": "mlp.fc2",
}
TEXT_LAYERS: Table = {
    **bert.LAYERS,
    "norm_cross": "crossattention.output.LayerNorm",
    "cross_attn.q": "crossattention.self.query",
    "cross_attn.kv": ("crossattention.self.key", "crossattention.self.value"),
    "cross_attn.proj": "crossattention.output.dense",
}
BEGIN, END, PAD = 30522, 102, 0  # ids of [DEC], [SEP] and [PAD]


def vision_sizes(config: Mapping[str, Any]) -> dict[str, Any]:
    return vit.sizes({"image_size": 384, "layer_norm_eps": 1e-5, **config})


def vision_sources(encoder: ViT, names: Names) -> Sources:
    return {
        "class_token": (("embeddings.class_embedding",), torch.flatten),
        "positions.weight": (("embeddings.position_embedding",), lambda table: table[0]),
        **modules({"patch_embed": "embeddings.patch_embedding", "norm": "post_layernorm"}),
        **layers(encoder.blocks, VISION_LAYERS, "encoder.layers"),
    }


def text_sizes(config: Mapping[str, Any]) -> dict[str, Any]:
    args = bert.text_sizes({"num_attention_heads": 8, "vocab_size": 30524, **config})
    names = {"dim": args["dim"], "vocab_size": args["vocab_size"], "norm_eps": args["norm_eps"]}
    head = part_of("VocabularyHead", bias=True, transform=args["activation"], **names)
    return args | {"context_dim": config.get("encoder_hidden_size", 768), "vocabulary_head": head}


def text_sources(decoder: Decoder, names: Names) -> Sources:
    return bert.text_sources(decoder, TEXT_LAYERS)


def text_head(decoder: Decoder, names: Names) -> Sources:
    return bert.predictions(names, embedding="token_embed.weight")


def generation(folder: str, config: Mapping[str, Any]) -> dict[str, Any]:
    """Options of writing: the decoder's own part of config.json has them, and texts end with [SEP]."""
    text = config["text_config"]
    begin, end, pad = (
        default if text.get(name) is None else text[name]
        for name, default in (("bos_token_id", BEGIN), ("sep_token_id", END), ("pad_token_id", PAD))
    )
    return {**text, "decoder_start_token_id": begin, "bos_token_id": begin, "eos_token_id": end, "pad_token_id": pad}


BLIP_VISION = Stack(kind=ViT, sizes=vision_sizes, sources=vision_sources)
BLIP_TEXT = Stack(
    kind=Decoder,
    stem="bert.",
    sizes=text_sizes,
    sources=text_sources,
    head=text_head,
    needed=bert.ABSOLUTE | {"is_decoder": True},
)
ARCHITECTURE = Architecture(
    parts=lambda config: {
        "encoder": Part(BLIP_VISION, config["vision_config"], "vision_model."),
        "decoder": Part(BLIP_TEXT, config["text_config"], "text_decoder."),
    },
    models={"BlipForConditionalGeneration": Model("captioning", captioner)},
    generation=generation,
    added=("[DEC]", "[ENC]"),
)
