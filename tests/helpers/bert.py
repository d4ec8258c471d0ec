"""Weights of Hugging Face's BERT in our text encoder."""

import torch


def copied(ours, theirs):
    """Our encoder with the weights of a BertModel."""
    names = {"embeddings.word_embeddings": "token_embed", "embeddings.token_type_embeddings": "type_embed"}
    names |= {"embeddings.LayerNorm": "embed_norm", "attention.output.dense": "attn.proj"}
    names |= {"attention.output.LayerNorm": "norm1", "output.LayerNorm": "norm2"}
    names |= {"intermediate.dense": "mlp.fc1", "output.dense": "mlp.fc2", "encoder.layer": "blocks"}
    state, parts = {}, {}
    for name, tensor in theirs.state_dict().items():
        if name == "embeddings.position_embeddings.weight":
            state["positions.weight"] = tensor
        elif ".attention.self." in name:
            layer, kind = name.split(".attention.self.")
            part, value = kind.split(".")
            parts.setdefault((layer.replace("encoder.layer", "blocks"), value), {})[part] = tensor
        elif not name.startswith("pooler"):
            for old, new in names.items():
                name = name.replace(old, new)
            state[name] = tensor
    for (layer, value), found in parts.items():
        state[f"{layer}.attn.qkv.{value}"] = torch.cat([found[part] for part in ("query", "key", "value")])
    ours.load_state_dict(state)
    return ours.eval()
