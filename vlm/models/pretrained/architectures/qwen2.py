"""Qwen2 and Qwen2.5 (Yang et al. 2024): Llama with biases in the query, key and value projections."""

from dataclasses import replace

from vlm.models.pretrained.architecture import Architecture, Model
from vlm.models.pretrained.architectures.llama import CLASS_HEAD, LLAMA, export_decoder
from vlm.models.pretrained.fields import Fields, integer
from vlm.models.pretrained.stack import Part, Stack

QWEN2 = replace(
    LLAMA,
    model_type="qwen2",
    sizes={
        **{name: one for name, one in LLAMA.sizes.items() if name != "head_dim"},
        "num_kv_heads": integer("num_key_value_heads", 32),
        "hidden": integer("intermediate_size", 22016),
        "qkv_bias": True,
        "vocab_size": integer("vocab_size", 151936),
        "max_len": integer("max_position_embeddings", 32768),
    },
    needed={"use_sliding_window": False},
    neutral_keys=("sliding_window", "max_window_layers"),  # of sliding windows, which are off
)


def part(stack: Stack, config: Fields) -> Part:
    """The stack's part; raises UserError if a layer has no full attention."""
    kinds = config.get("layer_types")
    if kinds is not None and (not isinstance(kinds, list) or any(kind != "full_attention" for kind in kinds)):
        raise config.fault("layer_types", "of which our Decoder has full_attention alone")
    return Part(stack, config)


QWEN2_ARCHITECTURE = Architecture(
    parts=lambda config: {"decoder": part(QWEN2, config)},
    models={"Qwen2ForCausalLM": Model("language_modeling", lambda config, parts: parts["decoder"])},
    unused=CLASS_HEAD,
    export=lambda model: export_decoder(model, QWEN2, "Qwen2ForCausalLM", qkv_bias=True),
)
