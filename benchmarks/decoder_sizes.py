"""Decoders of Llama's family in their published sizes, with random weights: models of `pretrained_equality.py`."""

import sys
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1] / "tests" / "helpers"))

import torch
import transformers as t
from hugging import END
from tokenizers import Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers

from vlm.data.text.library import PATTERNS

QWEN = next(one for one in PATTERNS if r"\p{L}+|\p{N}| ?" in one)


def byte_pairs(size: int = 50257, pattern: str | None = None) -> t.PreTrainedTokenizerFast:
    """Returns a tokenizer whose vocabulary is pairs of bytes, and triples if it is larger; by default of GPT-2's size.

    Args:
        pattern: Splits texts into words, after NFC; GPT-2's pattern by default.
    """
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    merges = [(a, b) for a in alphabet for b in alphabet]
    merges += [(a + b, c) for a, b in merges[: size // len(alphabet)] for c in alphabet]
    merges = merges[: size - 1 - len(alphabet)]
    pieces = [*alphabet, *(a + b for a, b in merges), END]
    tokenizer = Tokenizer(models.BPE(vocab={piece: id for id, piece in enumerate(pieces)}, merges=merges))
    tokenizer.pre_tokenizer, tokenizer.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel()
    if pattern is not None:
        split = pre_tokenizers.Split(Regex(pattern), "isolated")
        inside = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
        tokenizer.pre_tokenizer, tokenizer.normalizer = pre_tokenizers.Sequence([split, inside]), normalizers.NFC()
    return t.PreTrainedTokenizerFast(tokenizer_object=tokenizer, bos_token=END, eos_token=END, unk_token=END)


def decoder(kind: type, config: Any, pattern: str | None = None) -> list[Any]:
    """Returns a decoder of Llama's family with random weights, and its tokenizer."""
    tokenizer = byte_pairs(config.vocab_size, pattern)
    config.bos_token_id = config.eos_token_id = config.pad_token_id = tokenizer.eos_token_id
    model = kind(config)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            parameter.normal_(std=0.2)
            if "norm" in name and config.model_type != "gemma":  # Gemma multiplies by 1 + weight
                parameter.add_(1)
    return [model.eval(), tokenizer]


def llama_1b() -> list[Any]:
    """Llama 3.2 1B, with its scaled rotary positions."""
    rope = {"rope_type": "llama3", "factor": 32.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
    rope |= {"original_max_position_embeddings": 8192, "rope_theta": 5e5}
    sizes = {"hidden_size": 2048, "intermediate_size": 8192, "num_hidden_layers": 16, "num_attention_heads": 32}
    sizes |= {"num_key_value_heads": 8, "head_dim": 64, "vocab_size": 128256, "max_position_embeddings": 131072}
    return decoder(t.LlamaForCausalLM, t.LlamaConfig(**sizes, rope_parameters=rope, tie_word_embeddings=True))


def qwen2_half_b() -> list[Any]:
    sizes = {"hidden_size": 896, "intermediate_size": 4864, "num_hidden_layers": 24, "num_attention_heads": 14}
    sizes |= {"num_key_value_heads": 2, "vocab_size": 151936, "max_position_embeddings": 32768}
    rope = {"rope_type": "default", "rope_theta": 1e6}
    return decoder(t.Qwen2ForCausalLM, t.Qwen2Config(**sizes, rope_parameters=rope, tie_word_embeddings=True), QWEN)


def qwen3_half_b() -> list[Any]:
    """Qwen3 0.6B."""
    sizes = {"hidden_size": 1024, "intermediate_size": 3072, "num_hidden_layers": 28, "num_attention_heads": 16}
    sizes |= {"num_key_value_heads": 8, "head_dim": 128, "vocab_size": 151936, "max_position_embeddings": 40960}
    rope = {"rope_type": "default", "rope_theta": 1e6}
    return decoder(t.Qwen3ForCausalLM, t.Qwen3Config(**sizes, rope_parameters=rope, tie_word_embeddings=True), QWEN)


def gemma_2b() -> list[Any]:
    """Gemma 2B with a third of its layers."""
    sizes = {"hidden_size": 2048, "intermediate_size": 16384, "num_hidden_layers": 6, "num_attention_heads": 8}
    sizes |= {"num_key_value_heads": 1, "head_dim": 256, "vocab_size": 256000}
    return decoder(t.GemmaForCausalLM, t.GemmaConfig(**sizes))


DECODERS = {"llama_1b": llama_1b, "qwen2_half_b": qwen2_half_b, "qwen3_half_b": qwen3_half_b, "gemma_2b": gemma_2b}
