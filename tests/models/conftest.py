from collections.abc import Callable

import pytest
import torch


@pytest.fixture
def copy_gpt2() -> Callable:
    """Copies the weights of a Hugging Face GPT-2 into a Decoder; its linear layers hold them transposed."""

    def linear(ours, theirs):
        ours.weight.copy_(theirs.weight.T)
        ours.bias.copy_(theirs.bias)

    @torch.no_grad()
    def copy(decoder, gpt2):
        theirs = gpt2.transformer
        decoder.token_embed.weight.copy_(theirs.wte.weight)
        decoder.positions.weight.copy_(theirs.wpe.weight)
        decoder.norm.load_state_dict(theirs.ln_f.state_dict())
        for block, layer in zip(decoder.blocks, theirs.h, strict=True):
            block.norm1.load_state_dict(layer.ln_1.state_dict())
            block.norm2.load_state_dict(layer.ln_2.state_dict())
            linear(block.attn.qkv, layer.attn.c_attn)
            linear(block.attn.proj, layer.attn.c_proj)
            linear(block.mlp.fc1, layer.mlp.c_fc)
            linear(block.mlp.fc2, layer.mlp.c_proj)
            if block.cross_attn is not None:
                block.norm_cross.load_state_dict(layer.ln_cross_attn.state_dict())
                linear(block.cross_attn.q, layer.crossattention.q_attn)
                linear(block.cross_attn.kv, layer.crossattention.c_attn)
                linear(block.cross_attn.proj, layer.crossattention.c_proj)
        return decoder.eval()

    return copy
