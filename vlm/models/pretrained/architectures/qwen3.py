"""Qwen3 (Yang et al. 2025): Llama with an RMSNorm of the queries and keys of each head."""

from dataclasses import replace

from vlm.models.pretrained.architecture import Architecture, Model
from vlm.models.pretrained.architectures.llama import CLASS_HEAD, LLAMA, export_decoder
from vlm.models.pretrained.architectures.qwen2 import QWEN2, part
from vlm.models.pretrained.fields import integer

QWEN3 = replace(
    QWEN2,
    model_type="qwen3",
    sizes={**QWEN2.sizes, "head_dim": integer("head_dim", 128), "qkv_bias": None, "qk_norm": "rms"},
    names={**LLAMA.names, **{f"blocks.*.attn.head_norm.{one}": f"layers.*.self_attn.{one}_norm" for one in "qk"}},
    needed={**QWEN2.needed, "attention_bias": False},
)
QWEN3_ARCHITECTURE = Architecture(
    parts=lambda config: {"decoder": part(QWEN3, config)},
    models={"Qwen3ForCausalLM": Model("language_modeling", lambda config, parts: parts["decoder"])},
    unused=CLASS_HEAD,
    export=lambda model: export_decoder(model, QWEN3, "Qwen3ForCausalLM", qk_norm="rms"),
)
