"""GGUF files of small random models of `transformers`, laid out as llama.cpp's converter does it."""

import json
import math

import gguf
import numpy as np
import torch
import transformers
from hugging import byte_pairs, wide

# Of `transformers` -> of llama.cpp.
NAMES = {"model.embed_tokens": "token_embd", "model.norm": "output_norm", "lm_head": "output"}
NAMES |= {"input_layernorm": "attn_norm", "post_attention_layernorm": "ffn_norm", "self_attn.o_proj": "attn_output"}
NAMES |= {f"self_attn.{part}_proj": f"attn_{part}" for part in "qkv"}
NAMES |= {f"mlp.{part}_proj": f"ffn_{part}" for part in ("gate", "up", "down")}
LLAMA3 = {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
LLAMA3 |= {"original_max_position_embeddings": 8192, "rope_theta": 5e5}
PLAIN = {"rope_type": "default", "rope_theta": 1e5}
DECODERS = {
    "llama": ("Llama", {"rope_parameters": PLAIN, "tie_word_embeddings": False}),
    "tied": ("Llama", {"rope_parameters": PLAIN, "tie_word_embeddings": True, "head_dim": 24}),
    "llama3": ("Llama", {"rope_parameters": LLAMA3, "tie_word_embeddings": True, "num_key_value_heads": 4}),
    "linear": ("Llama", {"rope_parameters": PLAIN | {"rope_type": "linear", "factor": 2.0}}),
    "qwen2": ("Qwen2", {"rope_parameters": PLAIN, "tie_word_embeddings": True}),
}
# Where a block has the scales of its numbers, of 16 bits, in types that the library only reads.
SCALES = {"Q2_K": (80, 84), "Q3_K": (108, 110), "Q4_K": (0, 4), "Q5_K": (0, 4), "Q6_K": (208, 210)}
SCALES |= {f"IQ{name}": (0, 2) for name in ("4_NL", "4_XS", "3_S", "3_XXS", "2_S", "2_XS", "2_XXS", "1_S")}


def decoder(name="llama", *, tokenizer=None, width=64, **options):
    """A small random decoder of `transformers` and its tokenizer."""
    kind, own = DECODERS[name]
    tokenizer = tokenizer or byte_pairs(320)
    end = tokenizer.eos_token_id
    sizes = {"hidden_size": width, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2}
    sizes |= {"intermediate_size": 2 * width, "max_position_embeddings": 128, "vocab_size": len(tokenizer)}
    config = getattr(transformers, f"{kind}Config")(**sizes | own | options, bos_token_id=end, eos_token_id=end)
    return wide(getattr(transformers, f"{kind}ForCausalLM")(config), std=0.15, norms="RMSNorm"), tokenizer


def name_of(theirs):
    module, _, kind = theirs.rpartition(".")
    if not module.startswith("model.layers."):
        return f"{NAMES[module]}.{kind}"
    layer, _, inner = module.removeprefix("model.layers.").partition(".")
    return f"blk.{layer}.{NAMES[inner]}.{kind}"


def alternating(weight, heads):
    """Rows of queries or keys as a file of Llama has them: the two halves of each head alternate."""
    rows = weight.reshape(heads, 2, len(weight) // heads // 2, *weight.shape[1:])
    return rows.swapaxes(1, 2).reshape(weight.shape)


def divisors(rope, head_dim):
    """The numbers that divide the angles of Llama 3's positions."""
    low, high, length = rope["low_freq_factor"], rope["high_freq_factor"], rope["original_max_position_embeddings"]
    found = []
    for pair in range(head_dim // 2):
        wave = 2 * math.pi * rope["rope_theta"] ** (2 * pair / head_dim)
        smooth = min(1.0, max(0.0, (length / wave - low) / (high - low)))
        found.append(1 / ((1 - smooth) / rope["factor"] + smooth))
    return np.array(found, np.float32)


def quantise(weight, kind):
    """A matrix in blocks; for types that the library only reads, random blocks of its shape."""
    type_ = gguf.GGMLQuantizationType[kind]
    try:
        return gguf.quantize(weight, type_)
    except NotImplementedError:
        pass
    block, size = gguf.GGML_QUANT_SIZES[type_]
    drawn = np.random.default_rng(0).integers(256, size=(*weight.shape[:-1], weight.shape[-1] // block, size))
    drawn = _with_scale(drawn.astype(np.uint8), kind, np.float16(1))
    deviation = gguf.dequantize(drawn.reshape(*weight.shape[:-1], -1), type_).std()
    return _with_scale(drawn, kind, np.float16(0.1 / deviation)).reshape(*weight.shape[:-1], -1)


def _with_scale(blocks, kind, scale):
    """The blocks with another scale, which would be infinite or no number if it were drawn."""
    if kind == "IQ1_M":  # four bits of the scale are above each of the last four numbers of 16 bits
        numbers = np.ascontiguousarray(blocks[..., -8:]).view(np.uint16)
        bits = int(scale.view(np.uint16))
        numbers = numbers & 0x0FFF | np.array([(bits >> 4 * place & 15) << 12 for place in range(4)], np.uint16)
        blocks[..., -8:] = numbers.view(np.uint8)
    elif kind == "MXFP4":
        blocks[..., 0] = 127 + round(math.log2(scale))
    elif kind == "NVFP4":
        blocks[..., :4] = (7 + round(math.log2(scale))) << 3
    else:
        start, end = SCALES[kind]
        blocks[..., start:end] = np.frombuffer(scale.tobytes() * ((end - start) // 2), np.uint8)
    return blocks


def save_gguf(path, model, tokenizer, *, kind="F32", pre="gpt-2", values=(), change=None, **writing):
    """Writes a model of Llama's family.

    Args:
        tokenizer: Of byte pairs, or a model of SentencePiece.
        kind: Of the matrices.
        values: Values of the header that replace others, by their keys; None leaves one out.
        change: Changes the tensors, pairs of an array and the name of its type or None, by their names.
        writing: Options of the library's writer, such as `split_max_tensors`.
    """
    config, state = model.config, model.state_dict()
    arch = config.model_type
    heads = config.num_attention_heads
    head_dim = getattr(config, "head_dim", None) or config.hidden_size // heads
    rope = config.rope_parameters
    own = {"block_count": config.num_hidden_layers, "context_length": config.max_position_embeddings}
    own |= {"embedding_length": config.hidden_size, "feed_forward_length": config.intermediate_size}
    own |= {"attention.head_count": heads, "attention.head_count_kv": config.num_key_value_heads}
    own |= {"attention.layer_norm_rms_epsilon": float(config.rms_norm_eps), "vocab_size": config.vocab_size}
    own |= {"rope.freq_base": float(rope["rope_theta"]), "rope.dimension_count": head_dim}
    if head_dim * heads != config.hidden_size:
        own |= {"attention.key_length": head_dim, "attention.value_length": head_dim}
    if rope["rope_type"] == "linear":
        own |= {"rope.scaling.type": "linear", "rope.scaling.factor": float(rope["factor"])}
    header = {f"{arch}.{name}": value for name, value in own.items()}
    header |= {f"tokenizer.ggml.{name}": value for name, value in pieces(tokenizer, pre).items()}
    writer = gguf.GGUFWriter(path, arch, **writing)
    for key, value in (header | dict(values)).items():
        if value is not None:
            _add(writer, key, value)
    tensors = {}
    for theirs, tensor in state.items():
        if theirs == "lm_head.weight" and config.tie_word_embeddings:
            continue
        weight = tensor.float().numpy()
        if arch == "llama" and (".q_proj." in theirs or ".k_proj." in theirs):
            weight = alternating(weight, heads if ".q_proj." in theirs else config.num_key_value_heads)
        weight = np.ascontiguousarray(weight)
        is_plain = weight.ndim == 1 or kind == "F32"
        tensors[name_of(theirs)] = (weight, None) if is_plain else (quantise(weight, kind), kind)
    if rope["rope_type"] == "llama3":
        tensors["rope_freqs.weight"] = divisors(rope, head_dim), None
    if change is not None:
        change(tensors)
    for name, (values, stored) in tensors.items():
        writer.add_tensor(name, values, raw_dtype=None if stored is None else gguf.GGMLQuantizationType[stored])
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def pieces(tokenizer, pre):
    """What a file says of a tokenizer of byte pairs, or of a model of SentencePiece."""
    if hasattr(tokenizer, "get_score"):
        kinds = ((2, tokenizer.is_unknown), (3, tokenizer.is_control), (6, tokenizer.is_byte), (1, lambda id: True))
        pieces = range(tokenizer.get_piece_size())
        return {
            "model": "llama",
            "tokens": [tokenizer.id_to_piece(id) for id in pieces],
            "scores": [tokenizer.get_score(id) for id in pieces],
            "token_type": [next(kind for kind, holds in kinds if holds(id)) for id in pieces],
            **{"bos_token_id": tokenizer.bos_id(), "eos_token_id": tokenizer.eos_id()},
        }
    content = json.loads(tokenizer.backend_tokenizer.to_str())
    vocab = tokenizer.get_vocab()
    added = {token["id"]: 3 if token["special"] else 4 for token in content["added_tokens"]}
    tokens = sorted(vocab, key=vocab.get)
    return {
        "model": "gpt2",
        "pre": pre,
        "tokens": tokens,
        "token_type": [added.get(id, 1) for id in range(len(tokens))],
        "merges": [" ".join(pair) for pair in content["model"]["merges"]],
        "bos_token_id": tokenizer.bos_token_id,
        "eos_token_id": tokenizer.eos_token_id,
    }


def _add(writer, key, value):
    kinds = {bool: writer.add_bool, int: writer.add_uint32, float: writer.add_float32, str: writer.add_string}
    if type(value) is int and value < 0:
        writer.add_int32(key, value)
    else:
        kinds.get(type(value), writer.add_array)(key, value)


def dequantise(path, model):
    """The model with the weights of a file, read by the library alone."""
    heads = {"q": model.config.num_attention_heads, "k": model.config.num_key_value_heads}
    stored = {tensor.name: tensor for tensor in gguf.GGUFReader(path).tensors}
    with torch.no_grad():
        for theirs, weight in model.named_parameters():
            tensor = stored[name_of(theirs)]
            values = torch.from_numpy(np.array(gguf.dequantize(tensor.data, tensor.tensor_type), np.float32))
            values = values.view(weight.shape)
            part = theirs.split(".")[-2]
            if model.config.model_type == "llama" and part in ("q_proj", "k_proj"):
                pairs = values.unflatten(0, (heads[part[0]], -1, 2))
                values = torch.cat([pairs[:, :, 0], pairs[:, :, 1]], 1).flatten(0, 1)
            weight.copy_(values)
    return model
