"""Weights of Hugging Face's BERT in our text encoder, in our decoder and in its head."""

import torch

NAMES = {"embeddings.word_embeddings": "token_embed", "embeddings.token_type_embeddings": "type_embed"}
NAMES |= {"embeddings.LayerNorm": "embed_norm", "embeddings.position_embeddings": "positions"}
NAMES |= {"crossattention.output.dense": "cross_attn.proj", "crossattention.output.LayerNorm": "norm_cross"}
NAMES |= {"attention.output.dense": "attn.proj", "attention.output.LayerNorm": "norm1", "output.LayerNorm": "norm2"}
NAMES |= {"intermediate.dense": "mlp.fc1", "output.dense": "mlp.fc2", "encoder.layer": "blocks"}
# Projections that are one of ours: of self-attention, and of cross-attention.
JOINED = {"attn.qkv": [f"attention.self.{part}" for part in ("query", "key", "value")]}
JOINED |= {"cross_attn.q": ["crossattention.self.query"]}
JOINED |= {"cross_attn.kv": ["crossattention.self.key", "crossattention.self.value"]}


def rename_weights(theirs):
    """The weights of a BertModel under our names."""
    left, state = dict(theirs.state_dict()), {}
    for layer in {name.partition("attention")[0] for name in left if ".attention.self." in name}:
        ours = layer.replace("encoder.layer", "blocks")
        for own, parts in JOINED.items():
            for value in ("weight", "bias"):
                found = [left.pop(f"{layer}{part}.{value}") for part in parts if f"{layer}{part}.{value}" in left]
                if found:
                    state[f"{ours}{own}.{value}"] = torch.cat(found)
    for name, tensor in left.items():
        for old, new in NAMES.items():
            name = name.replace(old, new)
        if not name.startswith("pooler"):
            state[name] = tensor
    return state


def copy_weights(ours, theirs):
    """Our encoder with the weights of a BertModel."""
    ours.load_state_dict(rename_weights(theirs))
    return ours.eval()


def head_copied(ours, theirs):
    """Our head with the weights of the one that predicts words."""
    ours.dense.load_state_dict(theirs.transform.dense.state_dict())
    ours.norm.load_state_dict(theirs.transform.LayerNorm.state_dict())
    ours.bias.data.copy_(theirs.bias)


def writer_copied(ours, theirs):
    """Our decoder with the weights of a BertLMHeadModel, whose tokens are all of type 0."""
    state = rename_weights(theirs.bert)
    state["positions.weight"] = state["positions.weight"] + state.pop("type_embed.weight")[0]
    own = {name: tensor for name, tensor in ours.state_dict().items() if name.startswith("vocabulary_head")}
    ours.load_state_dict(state | own)
    head_copied(ours.vocabulary_head, theirs.cls.predictions)
    return ours.eval()
