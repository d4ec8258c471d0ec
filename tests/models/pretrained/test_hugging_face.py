"""Loading a folder of Hugging Face: what is taken, what is left over, and what is refused.

That the models then compute the same stands with the tests of each model.
"""

import copy
import json

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import (
    BertConfig,
    BertModel,
    GPT2Config,
    GPT2LMHeadModel,
    GPT2Model,
    VisionEncoderDecoderModel,
    ViTConfig,
    ViTForImageClassification,
    ViTModel,
)

from vlm.errors import UserError
from vlm.models.classifier import Classifier
from vlm.models.decoder import Decoder
from vlm.models.encoder_decoder import VisionLanguageModel
from vlm.models.pretrained.folder import Folder
from vlm.models.pretrained.load import load_hugging_face
from vlm.models.timm_encoder import TimmEncoder
from vlm.models.vit import ViT
from vlm.nn.embeddings import ConvStem
from vlm.nn.position import RotaryPositions

V, D, MAX_LEN = 31, 24, 20
SIZES = {"dim": D, "depth": 2, "num_heads": 3}
VIT = SIZES | {"image_size": 24, "patch_size": 8, "class_token": True, "norm_eps": 1e-12}
TEXT = SIZES | {"vocab_size": V, "max_len": MAX_LEN, "activation": "gelu_tanh"}


GPT2 = {"vocab_size": 31, "n_positions": 20, "n_embd": 24, "n_layer": 2, "n_head": 3}
GPT2 |= {"bos_token_id": 1, "eos_token_id": None, "pad_token_id": 0}
THEIR_VIT = {"image_size": 24, "patch_size": 8, "hidden_size": 24, "num_hidden_layers": 2}
THEIR_VIT |= {"num_attention_heads": 3, "intermediate_size": 96}


@pytest.fixture
def gpt2(scramble):
    def make(kind=GPT2LMHeadModel, **changes):
        model = scramble(kind(GPT2Config(**GPT2 | changes)))
        model.base_model.wpe.weight.data *= 8  # or a random model with tied embeddings repeats one token
        return model

    return make


@pytest.fixture
def hf_vit(scramble):
    return lambda kind=ViTModel, **changes: scramble(kind(ViTConfig(**THEIR_VIT | changes)))


@pytest.fixture
def vision_gpt2(scramble, gpt2, hf_vit):
    """A ViT with a GPT-2 that attends to it, through a projection where its width is another."""

    def make(**changes):
        text = gpt2(add_cross_attention=True, is_decoder=True)
        model = VisionEncoderDecoderModel(encoder=hf_vit(**changes), decoder=text)
        model.generation_config.decoder_start_token_id = 1
        if hasattr(model, "enc_to_dec_proj"):
            scramble(model.enc_to_dec_proj)
        return model.eval()

    return make


def vit(**options):
    return ViT(**VIT | options)


def decoder(**options):
    return Decoder(**TEXT | options)


def make_captioner(**options):
    return VisionLanguageModel(encoder=vit(), decoder=decoder(context_dim=D, **options))


@pytest.fixture
def folder(tmp_path):
    return tmp_path / "theirs"


@pytest.fixture
def saved(folder):
    """Saves a model and returns the folder's path."""

    def save(model, **options):
        model.save_pretrained(folder, **options)
        return str(folder)

    return save


def load_weights(model, path):
    return load_hugging_face(model, Folder(path))


def changed_names(model, before):
    return {name for name, tensor in model.state_dict().items() if not torch.equal(tensor, before[name])}


def edit_config(folder, **changes):
    path = folder / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))


def edit_tensors(folder, edit):
    path = folder / "model.safetensors"
    save_file(edit(load_file(path)), path)


def refusal_lines(model, path):
    """The lines of the fault that loading ends in, which must leave the model as it was."""
    before = copy.deepcopy(model.state_dict())
    with pytest.raises(UserError) as caught:
        load_weights(model, path)
    assert not changed_names(model, before)
    return str(caught.value).splitlines()


def test_gpt2_leaves_the_cross_attention_fresh(gpt2, saved):
    model, theirs = make_captioner().eval(), gpt2()
    before, path = copy.deepcopy(model.state_dict()), saved(theirs)
    assert load_weights(model, path) == [
        f"{path}: 28 tensors loaded",
        f"model: not in {path}, unchanged: decoder.blocks.*.cross_attn (12 tensors), "
        "decoder.blocks.*.norm_cross (4 tensors), encoder (30 tensors)",
    ]
    taken = {name for name in before if name.startswith("decoder.") and "cross" not in name}
    assert changed_names(model, before) == taken
    tokens = torch.randint(V, (2, MAX_LEN))
    ours = model.head(model.decoder(tokens))  # without an image
    torch.testing.assert_close(ours, theirs(tokens).logits, rtol=0, atol=1e-4)


@pytest.mark.parametrize("options", [{}, {"max_shard_size": "20KB"}])
def test_gpt2_without_a_head_and_in_shards(gpt2, saved, folder, options):
    theirs, model = gpt2(GPT2Model), decoder().eval()
    lines = load_weights(model, saved(theirs, **options))
    assert (folder / "model.safetensors.index.json").is_file() == bool(options)
    assert lines == [f"{folder}: 28 tensors loaded"]
    tokens = torch.randint(V, (2, MAX_LEN))
    torch.testing.assert_close(model(tokens), theirs(tokens).last_hidden_state, rtol=0, atol=1e-4)


def test_a_shorter_decoder_takes_the_first_positions(gpt2, saved, folder):
    theirs, model = gpt2(), decoder(max_len=8).eval()
    lines = load_weights(model, saved(theirs))
    assert lines == [f"{folder}: 28 tensors loaded", f"{folder}: unused: rows 8 to 19 of transformer.wpe.weight"]
    tokens = torch.randint(V, (2, 8))
    torch.testing.assert_close(model.head(model(tokens)), theirs(tokens).logits, rtol=0, atol=1e-4)


def test_half_precision_is_taken_as_float32(gpt2, saved):
    theirs, model = gpt2().bfloat16(), decoder()
    load_weights(model, saved(theirs))
    assert model.norm.weight.dtype == torch.float32
    assert torch.equal(model.norm.weight, theirs.transformer.ln_f.weight.float())


def test_a_stored_copy_of_the_embedding_is_the_head(gpt2, saved, folder):
    path, model = saved(gpt2()), decoder()
    edit_tensors(folder, lambda tensors: tensors | {"lm_head.weight": tensors["transformer.wte.weight"].clone()})
    assert load_weights(model, path) == [f"{path}: 29 tensors loaded"]
    edit_tensors(folder, lambda tensors: tensors | {"lm_head.weight": tensors["lm_head.weight"] + 1})
    assert "lm_head.weight and transformer.wte.weight in" in refusal_lines(model, path)[0]


def test_masks_of_old_folders_are_left_over(gpt2, saved, folder):
    path = saved(gpt2())
    masks = {f"transformer.h.{n}.attn.bias": torch.ones(1, 1, 20, 20) for n in range(2)}
    edit_tensors(folder, lambda tensors: tensors | masks)
    assert load_weights(decoder(), path)[1] == f"{path}: unused: transformer.h.*.attn.bias (2 tensors)"


def test_vit_leaves_the_decoder_fresh(hf_vit, saved, folder):
    model, theirs = make_captioner().eval(), hf_vit()
    lines = load_weights(model, saved(theirs))
    assert lines[1:] == [
        f"{folder}: unused: pooler (2 tensors)",
        f"model: not in {folder}, unchanged: decoder (44 tensors)",
    ]
    images = torch.randn(2, 3, 24, 24)
    truth = theirs(images).last_hidden_state
    torch.testing.assert_close(model.encode(images).states, truth, rtol=0, atol=1e-5)


@pytest.mark.parametrize("pool, classes, taken", [("class", 5, True), ("class", 6, False), ("mean", 5, False)])
def test_a_head_is_taken_where_it_means_the_same(hf_vit, saved, folder, pool, classes, taken):
    model = Classifier(encoder=vit(), num_classes=classes, pool=pool)
    path = saved(hf_vit(ViTForImageClassification, num_labels=5))
    left = f"{folder}: unused: classifier (2 tensors)"
    fresh = f"model: not in {folder}, unchanged: head (2 tensors)"
    assert load_weights(model, path)[1:] == ([] if taken else [left, fresh])
    assert model.head.weight.any() == taken
    assert load_weights(make_captioner(), path)[1] == left  # the encoder serves a captioner


def test_an_encoder_with_its_decoder_goes_on_training(vision_gpt2, saved, folder):
    model = make_captioner()
    lines = load_weights(model, saved(vision_gpt2()))
    assert lines[1:] == [f"{folder}: unused: encoder.pooler (2 tensors)"]
    assert all(parameter.requires_grad for parameter in model.parameters())
    model(torch.randn(1, 3, 24, 24), torch.randint(V, (1, 4))).sum().backward()
    assert all(parameter.grad is not None for parameter in model.parameters())


def test_every_difference_of_gpt2_is_named_with_its_remedy(gpt2, saved):
    model = decoder(
        vocab_size=30, max_len=40, dim=16, depth=3, num_heads=4, mlp_ratio=2.0, activation="gelu", norm="rms",
        norm_eps=1e-6, pre_norm=False, qk_norm=True, num_kv_heads=2, positions=RotaryPositions(head_dim=4),
    )  # fmt: skip
    path = saved(gpt2())
    assert set(refusal_lines(model, path)) == {
        f"num_kv_heads is 2, {path} has null; set model.num_kv_heads=null",
        f"norm is rms, {path} has layer; set model.norm=layer",
        f"pre_norm is false, {path} has true; set model.pre_norm=true",
        f"qk_norm is true, {path} has false; set model.qk_norm=false",
        f"positions is RotaryPositions(head_dim=4, base=10000.0), {path} has learned; choose model/position=learned",
        f"dim is 16, {path} has 24; set model.size.dim=24",
        f"depth is 3, {path} has 2; set model.size.depth=2",
        f"num_heads is 4, {path} has 3; set model.size.num_heads=3",
        f"mlp_ratio is 2.0, {path} has 4.0; set model.size.mlp_ratio=4.0",
        f"activation is gelu, {path} has gelu_tanh; set model.activation=gelu_tanh",
        f"norm_eps is 1e-06, {path} has 1e-05; set model.norm_eps=1e-05",
        f"vocab_size is 30, {path} has 31; choose the tokenizer it was trained with, of 31 tokens",
        f"max_len is 40, {path} has 20; set data.max_len=20 or less",
    }


def test_every_difference_of_vit_is_named_with_its_remedy(hf_vit, saved):
    model = vit(image_size=32, patch_size=16, class_token=False, head_dim=6, bias=False, norm_eps=1e-5)
    path = saved(hf_vit())
    assert set(refusal_lines(model, path)) == {
        f"head_dim is 6, {path} has null; set model.head_dim=null",
        f"bias is false, {path} has true; set model.bias=true",
        f"norm_eps is 1e-05, {path} has 1e-12; set model.norm_eps=1e-12",
        f"patch_size is 16, {path} has 8; set model.patch_size=8",
        f"class_token is false, {path} has true; set model.class_token=true",
    }


@pytest.mark.parametrize(
    "width, wanted", [(24, "model.size.num_heads=3"), (32, "model.size.num_heads=3 and model.encoder.num_heads=4")]
)
def test_sizes_are_said_once_where_encoder_and_decoder_agree(vision_gpt2, saved, width, wanted):
    theirs = vision_gpt2(hidden_size=width, num_attention_heads=width // 8, intermediate_size=4 * width)
    path = saved(theirs)
    encoder = vit(dim=width, num_heads=width // 8)
    model = VisionLanguageModel(encoder=encoder, decoder=decoder(num_heads=4, depth=1, context_dim=width))
    assert refusal_lines(model, path) == [
        f"decoder.depth is 1, {path} has 2; set model.size.decoder_depth=2",
        f"decoder.num_heads is 4, {path} has 3; set {wanted}",
    ]


def test_another_stem_and_other_positions_are_refused(hf_vit, saved):
    model = vit(stem=ConvStem(patch_size=8, dim=D), positions=RotaryPositions(head_dim=8))
    remedies = [line.split("; ")[1] for line in refusal_lines(model, saved(hf_vit()))]
    assert remedies == ["remove model.positions", "choose model/encoder=vit"]


@pytest.mark.parametrize("build", [vit, make_captioner, lambda: Classifier(encoder=vit(), num_classes=3)])
def test_another_family_is_refused(build, saved):
    path = saved(BertModel(BertConfig(vocab_size=9, hidden_size=8, num_hidden_layers=1, num_attention_heads=2)))
    assert "holds a bert for a TextEncoder" in refusal_lines(build(), path)[0]


@pytest.mark.slow
def test_a_folder_for_another_model_is_refused(gpt2, hf_vit, vision_gpt2, saved, folder):
    path = saved(gpt2())
    assert "holds a gpt2 for a Decoder, the model is a ViT, that has no decoder" in refusal_lines(vit(), path)[0]
    saved(vision_gpt2())
    assert "holds an encoder with a decoder, the model is a Decoder" in refusal_lines(decoder(), path)[0]
    saved(hf_vit())
    model = VisionLanguageModel(
        encoder=TimmEncoder(name="resnet10t", dim=D, image_size=32), decoder=decoder(context_dim=D)
    )
    assert "the model is a VisionLanguageModel, its encoder is a TimmEncoder" in refusal_lines(model, path)[0]
    (folder / "config.json").unlink()
    assert "has no config.json; give a folder written by save_pretrained" in refusal_lines(model, path)[0]


def test_missing_tensors_and_wrong_shapes_are_all_named(gpt2, hf_vit, saved, folder):
    path = saved(gpt2())

    def edit(tensors):
        del tensors["transformer.h.1.ln_2.bias"]
        shapes = {"transformer.ln_f.weight": torch.ones(7), "transformer.wte.weight": torch.ones(31)}
        return tensors | shapes | {"transformer.ln_f.bias": torch.ones(24, dtype=torch.int8)}

    edit_tensors(folder, edit)
    assert {*refusal_lines(decoder(), path)} == {
        f"norm.weight is (24,), {path} has transformer.ln_f.weight (7,); choose another folder",
        f"token_embed.weight is (31, 24), {path} has transformer.wte.weight (31,); choose another folder",
        f"transformer.ln_f.bias in {path} is torch.int8; give weights that are not quantised",
        f"{path} has no transformer.h.1.ln_2.bias, which blocks.1.norm2.bias needs; download it again",
    }
    saved(hf_vit())
    name = "encoder.layer.0.attention.attention.key.weight"  # a part that cannot be joined
    edit_tensors(folder, lambda tensors: tensors | {name: torch.ones(3, 5)})
    assert f"{name} (3, 5)" in refusal_lines(vit(), path)[0]


def test_many_faults_are_counted(gpt2, saved, folder):
    path = saved(gpt2())
    edit_tensors(folder, lambda tensors: {"transformer.wte.weight": tensors["transformer.wte.weight"]})
    lines = refusal_lines(decoder(), path)
    assert len(lines) == 21 and lines[-1] == "7 more"


def test_tensors_that_no_table_names_are_refused(gpt2, saved, folder):
    path = saved(gpt2())
    new = {"transformer.h.0.attn.c_attn.weight_scale": torch.ones(1), "transformer.h.7.ln_1.bias": torch.ones(24)}
    edit_tensors(folder, lambda tensors: tensors | new | {"score.weight": torch.ones(2, 24)})
    assert refusal_lines(decoder(), path) == [
        f"transformer.h.0.attn.c_attn.weight_scale in {path} belongs to an unsupported quantisation; "
        "choose another folder",
        f"transformer.h.7.ln_1.bias in {path} is not a known tensor of gpt2; choose another folder",
    ]
    edit_tensors(folder, lambda tensors: {name: one for name, one in tensors.items() if name not in new})
    assert load_weights(decoder(), path)[1] == f"{path}: unused: score (1 tensor)"


def test_weights_of_eight_bits_without_scales_are_refused_and_float64_is_read(gpt2, saved, folder):
    theirs, name = gpt2(), "transformer.ln_f.weight"
    path = saved(theirs)
    for dtype in (torch.float8_e4m3fn, torch.float8_e5m2, torch.uint8, torch.int8, torch.bool):
        edit_tensors(folder, lambda tensors, dtype=dtype: tensors | {name: torch.ones(24).to(dtype)})
        assert refusal_lines(decoder(), path) == [f"{name} in {path} is {dtype}; give weights that are not quantised"]
    edit_tensors(folder, lambda tensors: tensors | {name: theirs.transformer.ln_f.weight.detach().double()})
    model = decoder()
    load_weights(model, path)
    assert model.norm.weight.equal(theirs.transformer.ln_f.weight)


@pytest.mark.parametrize("name", ["gamma", "weight"])
def test_one_tensor_under_two_names_is_refused(name, saved, folder):
    config = BertConfig(vocab_size=9, hidden_size=8, num_hidden_layers=1, num_attention_heads=2, intermediate_size=8)
    path = saved(BertModel(config))
    edit_tensors(folder, lambda tensors: tensors | {f"embeddings.LayerNorm.{name}": torch.ones(8)})
    if name == "gamma":
        with pytest.raises(UserError, match=r"has both embeddings\.LayerNorm\.(gamma|weight) and"):
            Folder(path).read_weights()
    else:
        assert Folder(path).read_weights()


def test_pickles_are_not_read_and_converting_them_is_told(gpt2, saved, folder):
    path = saved(gpt2())
    (folder / "model.safetensors").unlink()
    assert "has no model.safetensors" in refusal_lines(decoder(), path)[0]
    torch.save(gpt2().state_dict(), folder / "pytorch_model.bin")
    lines = refusal_lines(decoder(), path)
    assert "holds only pytorch_model.bin, a pickle, which vlm does not read" in lines[0]
    assert f"t.GPT2LMHeadModel.from_pretrained('{path}').save_pretrained('{path}')" in lines[1]
