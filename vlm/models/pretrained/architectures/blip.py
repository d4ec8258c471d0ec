"""BLIP's captioner (Li et al. 2022): a ViT, and a decoder with BERT's layout that cross-attends to it."""

from typing import Any

from vlm.models.decoder import Decoder
from vlm.models.pretrained.architecture import Architecture, Model, captioner, spec_of
from vlm.models.pretrained.architectures import bert, vit
from vlm.models.pretrained.fields import Fields, integer, number, square
from vlm.models.pretrained.stack import Part, Paths, Stack, layers, table, token
from vlm.models.vit import ViT

VISION_LAYERS: Paths = {
    "norm1": "layer_norm1",
    "attn.qkv": "self_attn.qkv",
    "attn.proj": "self_attn.projection",
    "norm2": "layer_norm2",
    "mlp.fc1": "mlp.fc1",
    "mlp.fc2": "mlp.fc2",
}
TEXT_LAYERS: Paths = {
    **bert.BERT_LAYERS,
    "norm_cross": "crossattention.output.LayerNorm",
    "cross_attn.q": "crossattention.self.query",
    "cross_attn.kv": ("crossattention.self.key", "crossattention.self.value"),
    "cross_attn.proj": "crossattention.output.dense",
}
IDS = {"bos_token_id": 30522, "sep_token_id": 102, "pad_token_id": 0}  # [DEC], [SEP] and [PAD]
BLIP_VISION = Stack(
    kind=ViT,
    model_type="blip_vision_model",
    sizes={**vit.VIT.sizes, "image_size": square("image_size", 384), "norm_eps": number("layer_norm_eps", 1e-5)},
    names={
        "class_token": token("embeddings.class_embedding"),
        "positions.weight": table("embeddings.position_embedding"),
        "patch_embed": "embeddings.patch_embedding",
        "norm": "post_layernorm",
        **layers(VISION_LAYERS, "encoder.layers"),
    },
    needed={"num_channels": 3},
    neutral_keys=("projection_dim",),
)


def text_head(sizes: dict[str, Any], config: Fields) -> dict[str, Any]:
    same = {name: sizes[name] for name in ("dim", "vocab_size", "norm_eps")}
    return {"vocabulary_head": spec_of("VocabularyHead", bias=True, transform=sizes["activation"], **same)}


BLIP_TEXT = Stack(
    kind=Decoder,
    model_type="blip_text_model",
    prefix="bert.",
    sizes=bert.TEXT_SIZES
    | {
        "num_heads": integer("num_attention_heads", 8),
        "vocab_size": integer("vocab_size", 30524),
        "context_dim": integer("encoder_hidden_size", 768),
    },
    more=text_head,
    names={**bert.ENTRANCE, **layers(TEXT_LAYERS, "encoder.layer")},
    head={**bert.BERT_PREDICTIONS, **bert.TIED},
    unused=("embeddings.position_ids",),
    needed=bert.NEEDED | {"is_decoder": True, "tie_word_embeddings": True},
    neutral_keys=(
        "add_cross_attention",
        "encoder_hidden_size",
        "projection_dim",
    ),  # cross-attention is as wide as the encoder
)


def generation(config: Fields) -> Fields:
    """Decoding options: those of the decoder's part of config.json, with texts that end with [SEP]."""
    config.require({"tie_word_embeddings": True}, "our Decoder")
    text = config.part("text_config")
    ids = {name: default if name not in text else text.values[name] for name, default in IDS.items()}
    return text | ids | {"decoder_start_token_id": ids["bos_token_id"], "eos_token_id": ids["sep_token_id"]}


BLIP_ARCHITECTURE = Architecture(
    parts=lambda config: {
        "encoder": Part(BLIP_VISION, config.part("vision_config"), "vision_model."),
        "decoder": Part(BLIP_TEXT, config.part("text_config"), "text_decoder."),
    },
    models={"BlipForConditionalGeneration": Model("captioning", captioner)},
    generation=generation,
    neutral_keys=("image_text_hidden_size", "projection_dim"),
    added=("[DEC]", "[ENC]"),
)
