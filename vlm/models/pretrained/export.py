"""Models of ours as Hugging Face describes and stores them: the way back of `load`.

A ViT with a class token is a ViTModel; one without is the encoder of SigLIP, which is laid out alike and has none. A
decoder is a GPT-2, with cross-attention or without.
"""

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn

from vlm.errors import UserError
from vlm.models.classifier import Classifier
from vlm.models.decoder import Decoder
from vlm.models.encoder_decoder import VisionLanguageModel
from vlm.models.pretrained.sizes import sizes_built
from vlm.models.vit import ViT

Tensors = dict[str, Tensor]
ACTIVATIONS = {"relu": "relu", "gelu": "gelu", "gelu_tanh": "gelu_pytorch_tanh", "quick_gelu": "quick_gelu"}
# What the layers of theirs are, and the remedy for another value.
NEEDED = {
    "stem": ("PatchEmbed", "model/encoder=vit"),
    "positions": ("learned", "model/position=learned"),
    "norm": ("layer", ""),
    "pre_norm": (True, ""),
    "qk_norm": (False, ""),
    "bias": (True, ""),
    "head_dim": (None, ""),
    "num_kv_heads": (None, ""),
}
VIT_LAYERS = {
    "layernorm_before": "norm1",
    "attention.attention.query": "attn.qkv.0",
    "attention.attention.key": "attn.qkv.1",
    "attention.attention.value": "attn.qkv.2",
    "attention.output.dense": "attn.proj",
    "layernorm_after": "norm2",
    "intermediate.dense": "mlp.fc1",
    "output.dense": "mlp.fc2",
}
SIGLIP_LAYERS = {
    "layer_norm1": "norm1",
    "self_attn.q_proj": "attn.qkv.0",
    "self_attn.k_proj": "attn.qkv.1",
    "self_attn.v_proj": "attn.qkv.2",
    "self_attn.out_proj": "attn.proj",
    "layer_norm2": "norm2",
    "mlp.fc1": "mlp.fc1",
    "mlp.fc2": "mlp.fc2",
}
GPT2_LAYERS = {
    "ln_1": "norm1",
    "attn.c_attn": "attn.qkv",
    "attn.c_proj": "attn.proj",
    "ln_cross_attn": "norm_cross",
    "crossattention.q_attn": "cross_attn.q",
    "crossattention.c_attn": "cross_attn.kv",
    "crossattention.c_proj": "cross_attn.proj",
    "ln_2": "norm2",
    "mlp.c_fc": "mlp.fc1",
    "mlp.c_proj": "mlp.fc2",
}


def described(model: nn.Module) -> tuple[dict[str, Any], Tensors]:
    """The content of config.json for a model, and its tensors.

    Raises:
        UserError: No class of theirs computes the same; the message names the key of the config.
    """
    if isinstance(model, VisionLanguageModel) and type(model.encoder) is ViT:
        return _captioner(model.encoder, model.decoder)
    if isinstance(model, Classifier) and type(model.encoder) is ViT:
        return _classifier(model, model.encoder)
    if type(model) is Decoder:
        _refuse(model, "model")
        config, tensors = _gpt2(model)
        return config | {"architectures": ["GPT2LMHeadModel"]}, _under("transformer.", tensors)
    kind = type(getattr(model, "encoder", model)).__name__
    raise UserError(
        f"model: no class of Hugging Face computes a {type(model).__name__} of a {kind}; export --to safetensors"
    )


def _captioner(encoder: ViT, decoder: Decoder) -> tuple[dict[str, Any], Tensors]:
    _refuse(encoder, "model.encoder")
    _refuse(decoder, "model.decoder")
    if encoder.dim > decoder.token_embed.embedding_dim:
        raise UserError(
            f"model.encoder.dim: {encoder.dim} is more than the decoder's {decoder.token_embed.embedding_dim}, which "
            "no VisionEncoderDecoderModel with a GPT-2 computes; export --to safetensors"
        )
    image_config, images = _vit(encoder)
    text_config, texts = _gpt2(decoder)
    text_config |= {"add_cross_attention": True, "is_decoder": True}
    tensors = _under("encoder.", images) | _under("decoder.transformer.", texts)
    if encoder.dim < decoder.token_embed.embedding_dim:
        tensors |= _widened(encoder.dim, tensors)
    if encoder.class_token is not None:  # a ViTModel has a layer that nothing here reads; without it there is a warning
        dim = encoder.dim
        tensors |= {"encoder.pooler.dense.weight": torch.zeros(dim, dim), "encoder.pooler.dense.bias": torch.zeros(dim)}
    config = {"model_type": "vision-encoder-decoder", "architectures": ["VisionEncoderDecoderModel"]}
    parts = {"encoder": image_config, "decoder": text_config, "is_encoder_decoder": True}
    return config | parts | {"tie_word_embeddings": False}, tensors


def _widened(dim: int, tensors: Tensors) -> Tensors:
    """States of the encoder filled up with zeros to the decoder's width, and the layers that read them."""
    layers = {name: tensor for name, tensor in tensors.items() if name.endswith("crossattention.c_attn.weight")}
    width = next(iter(layers.values())).shape[1] // 2
    filled = {name: torch.cat([one, one.new_zeros(width - dim, 2 * width)]) for name, one in layers.items()}
    projection = {"enc_to_dec_proj.weight": torch.eye(width, dim), "enc_to_dec_proj.bias": torch.zeros(width)}
    return filled | projection


def _classifier(model: Classifier, encoder: ViT) -> tuple[dict[str, Any], Tensors]:
    _refuse(encoder, "model.encoder")
    by_class, head = encoder.class_token is not None, {f"classifier.{k}": v for k, v in model.head.named_parameters()}
    if model.pool != ("class" if by_class else "mean"):
        raise UserError(
            f"model.pool: {model.pool}, with class_token={str(by_class).lower()}, is computed by no class of Hugging "
            "Face; class with a class token and mean without are; export --to safetensors"
        )
    config, tensors = _vit(encoder)
    if by_class:
        return config | {"architectures": ["ViTForImageClassification"]}, _under("vit.", tensors) | head
    config = {"model_type": "siglip", "architectures": ["SiglipForImageClassification"], "vision_config": config}
    return config, _under("vision_model.", tensors) | head


def _vit(vit: ViT) -> tuple[dict[str, Any], Tensors]:
    sizes, state = sizes_built(vit), vit.state_dict()
    config = {
        "hidden_size": sizes["dim"],
        "num_hidden_layers": sizes["depth"],
        "num_attention_heads": sizes["num_heads"],
        "intermediate_size": round(sizes["mlp_ratio"] * sizes["dim"]),
        "hidden_act": ACTIVATIONS[sizes["activation"]],
        "layer_norm_eps": sizes["norm_eps"],
        "image_size": sizes["image_size"],
        "patch_size": sizes["patch_size"],
        "num_channels": 3,
    }
    if vit.class_token is None:
        config = {"model_type": "siglip_vision_model", **config, "vision_use_head": False}
        tensors = {"embeddings.position_embedding.weight": state["positions.weight"]}
        tensors |= _modules(state, {"embeddings.patch_embedding": "patch_embed", "post_layernorm": "norm"})
        return config, tensors | _layers(state, sizes["depth"], SIGLIP_LAYERS, "encoder.layers")
    config = {"model_type": "vit", **config, "qkv_bias": True, "hidden_dropout_prob": 0.0}
    tensors = {"embeddings.cls_token": state["class_token"][None, None]}
    tensors |= {"embeddings.position_embeddings": state["positions.weight"][None]}
    tensors |= _modules(state, {"embeddings.patch_embeddings.projection": "patch_embed", "layernorm": "norm"})
    return config, tensors | _layers(state, sizes["depth"], VIT_LAYERS, "encoder.layer")


def _gpt2(decoder: Decoder) -> tuple[dict[str, Any], Tensors]:
    sizes, state = sizes_built(decoder), decoder.state_dict()
    config = {
        "model_type": "gpt2",
        "vocab_size": sizes["vocab_size"],
        "n_positions": sizes["max_len"],
        "n_embd": sizes["dim"],
        "n_layer": sizes["depth"],
        "n_head": sizes["num_heads"],
        "n_inner": round(sizes["mlp_ratio"] * sizes["dim"]),
        "activation_function": ACTIVATIONS[sizes["activation"]],
        "layer_norm_epsilon": sizes["norm_eps"],
        **dict.fromkeys(("resid_pdrop", "embd_pdrop", "attn_pdrop"), 0.0),
        "tie_word_embeddings": True,
    }
    tensors = {"wte.weight": state["token_embed.weight"], "wpe.weight": state["positions.weight"]}
    tensors |= _modules(state, {"ln_f": "norm"})
    layers = _layers(state, sizes["depth"], GPT2_LAYERS, "h")
    # GPT-2's linear layers hold their weights transposed.
    return config, tensors | {name: one.T if one.dim() == 2 else one for name, one in layers.items()}


def _layers(state: Tensors, depth: int, table: dict[str, str], theirs: str) -> Tensors:
    tensors: Tensors = {}
    for number in range(depth):
        inside = {f"{theirs}.{number}.{name}": f"blocks.{number}.{ours}" for name, ours in table.items()}
        tensors |= _modules(state, inside)
    return tensors


def _modules(state: Tensors, table: dict[str, str]) -> Tensors:
    """Weights and biases by their names; a number at the end of ours is that of a third."""
    tensors = {}
    for name, ours in table.items():
        module, _, third = ours.rpartition(".")
        for kind in ("weight", "bias"):
            if third.isdigit() and module.endswith("qkv"):
                tensors[f"{name}.{kind}"] = state[f"{module}.{kind}"].chunk(3)[int(third)]
            elif f"{ours}.{kind}" in state:  # a decoder without context has no cross-attention
                tensors[f"{name}.{kind}"] = state[f"{ours}.{kind}"]
    return tensors


def _under(prefix: str, tensors: Tensors) -> Tensors:
    return {f"{prefix}{name}": tensor for name, tensor in tensors.items()}


def _refuse(stack: ViT | Decoder, key: str) -> None:
    """Refuses a stack whose layers are not theirs.

    Raises:
        UserError: It names each key with its value.
    """
    faults = list(_faults(stack, key))
    if faults:
        raise UserError(f"{'; '.join(faults)}; no class of Hugging Face computes that: export --to safetensors")


def _faults(stack: ViT | Decoder, key: str) -> Iterator[str]:
    sizes = sizes_built(stack)
    for name, (needed, remedy) in NEEDED.items():
        if sizes.get(name, needed) != needed:
            instead = f" (train with {remedy} for one that fits)" if remedy else ""
            yield f"{key}.{name} is {sizes[name]}, not {needed}{instead}"
    if sizes["activation"] not in ACTIVATIONS:
        yield f"{key}.activation is {sizes['activation']}, not one of {', '.join(ACTIVATIONS)}"
    for name in ("prefix", "vocabulary_head", "distillation_token"):
        if getattr(stack, name, None) is not None:
            yield f"{key}.{name} is set"
    if not isinstance(getattr(stack, "embed_norm", None), nn.Identity | None):
        yield f"{key}.embed_norm is true, not false"
