"""Gemma (2024): Llama with GEGLU, norms by 1 + w and scaled embeddings. Gemma 2 and 3 have other layers."""

from dataclasses import replace
from typing import Any

from vlm.models.pretrained.architecture import Architecture, Model
from vlm.models.pretrained.architectures import llama
from vlm.models.pretrained.architectures.llama import CLASS_HEAD, LLAMA, export_decoder
from vlm.models.pretrained.fields import Fields, choice, integer
from vlm.models.pretrained.stack import Part

# The first release states "gelu", but means and was trained with the tanh approximation.
LEGACY = "gelu"
GEMMA_ACTIVATIONS = {theirs: ours for theirs, ours in llama.LLAMA_ACTIVATIONS.items() if theirs != LEGACY} | {
    LEGACY: "geglu_tanh"
}
SECOND_ACTIVATION = choice("hidden_activation", None, GEMMA_ACTIVATIONS)


def scaled_embedding(sizes: dict[str, Any], config: Fields) -> dict[str, Any]:
    """Arguments for rotary positions, the head and scaled embeddings.

    Raises:
        UserError: Both keys of the activation are given and differ; each of them has had precedence in some version of
            transformers.
    """
    if config.read(SECOND_ACTIVATION) not in (None, sizes["activation"]):
        raise config.fault(SECOND_ACTIVATION.name, "and hidden_act is another activation")
    return {**llama.rotary_and_head(sizes, config, tied=True), "embed_scale": sizes["dim"] ** 0.5}


GEMMA = replace(
    LLAMA,
    model_type="gemma",
    sizes={
        **LLAMA.sizes,
        "dim": integer("hidden_size", 3072),
        "depth": integer("num_hidden_layers", 28, high=1000),
        "num_heads": integer("num_attention_heads", 16),
        "num_kv_heads": integer("num_key_value_heads", 16),
        "head_dim": integer("head_dim", 256),
        "hidden": integer("intermediate_size", 24576),
        "activation": choice("hidden_act", "gelu_pytorch_tanh", GEMMA_ACTIVATIONS),
        "norm": "rms_plus_one",
        "vocab_size": integer("vocab_size", 256000),
        "max_len": integer("max_position_embeddings", 8192),
    },
    more=scaled_embedding,
    needed={"attention_bias": False, "use_bidirectional_attention": None},
)
GEMMA_ARCHITECTURE = Architecture(
    parts=lambda config: {"decoder": Part(GEMMA, config)},
    models={"GemmaForCausalLM": Model("language_modeling", lambda config, parts: parts["decoder"])},
    unused=CLASS_HEAD,
    export=lambda model: export_decoder(model, GEMMA, "GemmaForCausalLM", norm="rms_plus_one"),
)
