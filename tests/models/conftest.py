"""Small random models of Hugging Face, and loading their weights through a folder."""

from collections.abc import Callable

import pytest
from transformers import GPT2Config, GPT2LMHeadModel, VisionEncoderDecoderModel, ViTConfig, ViTModel

from vlm.models.pretrained.folder import Folder
from vlm.models.pretrained.load import load_hugging_face

GPT2 = {"vocab_size": 31, "n_positions": 20, "n_embd": 24, "n_layer": 2, "n_head": 3}
GPT2 |= {"bos_token_id": 1, "eos_token_id": None, "pad_token_id": 0}
VIT = {"image_size": 24, "patch_size": 8, "hidden_size": 24, "num_hidden_layers": 2}
VIT |= {"num_attention_heads": 3, "intermediate_size": 96}


@pytest.fixture
def gpt2(scramble) -> Callable:
    def make(kind=GPT2LMHeadModel, **changes):
        model = scramble(kind(GPT2Config(**GPT2 | changes)))
        model.base_model.wpe.weight.data *= 8  # or a random model with tied embeddings repeats one token
        return model

    return make


@pytest.fixture
def hf_vit(scramble) -> Callable:
    return lambda kind=ViTModel, **changes: scramble(kind(ViTConfig(**VIT | changes)))


@pytest.fixture
def vision_gpt2(scramble, gpt2, hf_vit) -> Callable:
    """A ViT with a GPT-2 that attends to it, through a projection where its width is another."""

    def make(**changes):
        text = gpt2(add_cross_attention=True, is_decoder=True)
        model = VisionEncoderDecoderModel(encoder=hf_vit(**changes), decoder=text)
        model.generation_config.decoder_start_token_id = 1
        if hasattr(model, "enc_to_dec_proj"):
            scramble(model.enc_to_dec_proj)
        return model.eval()

    return make


@pytest.fixture
def load(tmp_path) -> Callable:
    """Loads the weights of one of their models into one of ours, through a folder."""

    def load(model, theirs, **options):
        theirs.save_pretrained(tmp_path / "theirs", **options)
        load_hugging_face(model, Folder(tmp_path / "theirs"))
        return model.eval()

    return load
