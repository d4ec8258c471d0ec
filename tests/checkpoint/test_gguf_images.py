"""GGUF files of models that read images: written, read again with --mmproj, and compared with llama.cpp's results."""

import json
import shutil
from pathlib import Path

import gguf
import numpy as np
import pytest
import torch
import transformers as t
from gguf_files import save_gguf
from hugging import byte_pairs, gpt2, wide
from image_text import TEMPLATES, saved_image_text
from llama_cpp_models import (
    IMAGE_MODELS,
    LANGUAGE_MODELS,
    LENGTH,
    PROMPTS,
    digest,
    make_image_model,
    rounding_of_llama_cpp,
    save_language_model,
    tabulated_gelu,
)
from llama_cpp_models import generate as greedy
from PIL import Image

import vlm
from vlm.checkpoint.export import export
from vlm.checkpoint.load import load_model, read
from vlm.cli.main import run as command
from vlm.data.text.tokenizer import tokenizer_from_state
from vlm.errors import UserError
from vlm.models.pretrained.place import join_pair

FIXTURE = json.loads((Path(__file__).parent / "files" / "llama_cpp.json").read_text())
FAMILIES = [name for name in IMAGE_MODELS if name != "llava_clip"]


@pytest.fixture(scope="module")
def models(tmp_path_factory):
    """Folders of transformers with exports: {name: folder, with model and gguf}."""
    found = {}
    for name in IMAGE_MODELS:
        folder = tmp_path_factory.mktemp(name)
        model, processor = make_image_model(name)
        model.save_pretrained(folder / "model")
        processor.save_pretrained(folder / "model")
        export(str(folder / "model"), str(folder / "gguf"), form="gguf", outtype="f32")
        found[name] = folder
    return found


def pair(folder):
    return join_pair(folder / "gguf" / "model-F32.gguf", str(folder / "gguf" / "mmproj-model-F32.gguf"))


def photo(folder, side=32):
    rng = np.random.default_rng(3)
    image = Image.fromarray(rng.integers(256, size=(side, side + 9, 3)).astype(np.uint8))
    image.save(folder / "photo.png")
    return str(folder / "photo.png")


@torch.no_grad()
@pytest.mark.parametrize("name", IMAGE_MODELS)
def test_what_is_written_is_read_as_the_same_model(models, name):
    theirs, ours = read(models[name] / "model"), read(pair(models[name]))
    positions = "model.encoder.backbone.positions.weight"  # of Idefics3, one per patch in a file
    moved = {positions} if name == "smolvlm" else set()
    assert theirs["state_dict"].keys() == ours["state_dict"].keys()
    for key in theirs["state_dict"].keys() - moved:
        torch.testing.assert_close(ours["state_dict"][key], theirs["state_dict"][key], rtol=0, atol=1e-6, msg=key)
    about, again = dict(theirs["vlm"]), dict(ours["vlm"])
    pixels = torch.randn(2, 3, *[about["preprocess"]["image_size"]] * 2)
    states = [load_model(loaded).encode(pixels).states for loaded in (theirs, ours)]
    torch.testing.assert_close(*states, rtol=0, atol=1e-5)
    saved, restored = (tokenizer_from_state(part.pop("tokenizer")) for part in (about, again))
    for part in (about, again):
        part.pop("origin")
        part["decoding"] = {**part["decoding"], "ends": sorted(part["decoding"]["ends"])}
        part["model"]["args"]["encoder"]["args"]["backbone"]["args"].pop("positions", None)
    assert about == again
    text = "a red circle 12<image>\n\n <|im_end|>"
    assert saved.encode_marked(text) == restored.encode_marked(text)


@pytest.mark.parametrize("name", FAMILIES)
def test_captions_are_those_of_the_folder(models, tmp_path, capsys, name):
    folder, image = models[name], photo(tmp_path, 70)
    lines = []
    files = folder / "gguf"
    projector = ["--mmproj", str(files / "mmproj-model-F32.gguf")]
    for place, more in ((folder / "model", []), (files / "model-F32.gguf", projector)):
        arguments = ["--prompt", "<image>\nwhat", "--max-tokens", "8", "--batch-size", "1"]
        assert command(["caption", image, "-c", str(place), *more, *arguments]) == 0
        lines.append(capsys.readouterr().out)
    assert lines[0] == lines[1] and len(lines[0].split("\t")[-1]) > 3
    assert command(["info", "-c", str(files / "model-F32.gguf"), *projector]) == 0
    assert "ViT" in capsys.readouterr().out
    assert command(["import", str(files / "model-F32.gguf"), *projector, "--out", str(tmp_path / "own.ckpt")]) == 0
    assert read(tmp_path / "own.ckpt")["state_dict"].keys() == read(folder / "model")["state_dict"].keys()


@pytest.mark.slow
def test_a_file_with_its_projector_is_trained_and_evaluated(models, tmp_path, monkeypatch, capsys):
    """The base of adapters is found again from another folder."""
    folder = tmp_path / "files"
    shutil.copytree(models["smolvlm"] / "gguf", folder)
    monkeypatch.chdir(folder)
    drawn = [f"data.source.{split}_scenes=4" for split in ("train", "val", "test")]
    data = ["task=captioning", "data=shapes", *drawn, "data.num_workers=0", "task.max_tokens=4"]
    words = ["model=pretrained", "model.path=model-F32.gguf", *data, "test=false", "data.batch_size=4", "trainer=cpu"]
    words += ["trainer.max_steps=1", "optim.lr=1e-9", "callbacks.progress=null", "model/adapt=lora", "runs=runs"]
    assert command(["train", *words, "model.mmproj=none.gguf"]) == 2
    assert "model.mmproj=none.gguf: no such GGUF file" in capsys.readouterr().err
    assert command(["train", *words, "model.mmproj=mmproj-model-F32.gguf"]) == 0
    capsys.readouterr()
    given = ["-c", "model-F32.gguf", "--mmproj", "mmproj-model-F32.gguf"]
    assert command(["evaluate", *given, *data, "--out", str(tmp_path / "before")]) == 0
    monkeypatch.chdir(tmp_path)
    (run,) = (folder / "runs").glob("*/*")
    assert command(["evaluate", "-c", str(run), "--split", "test", "--out", str(tmp_path / "after")]) == 0
    before, after = (json.loads((tmp_path / part / "metrics.json").read_text()) for part in ("before", "after"))
    assert before["test/mean_length"] == after["test/mean_length"] > 0


@pytest.mark.parametrize("name", IMAGE_MODELS)
def test_header_and_tensors_have_the_librarys_names(models, name):
    reader = gguf.GGUFReader(models[name] / "gguf" / "mmproj-model-F32.gguf")
    value = {key: field.contents() for key, field in reader.fields.items()}
    keys, smol = gguf.Keys.ClipVision, name == "smolvlm"
    expected = {
        gguf.Keys.General.ARCHITECTURE: "clip",
        gguf.Keys.General.TYPE: gguf.GGUFType.MMPROJ,
        gguf.Keys.Clip.HAS_VISION_ENCODER: True,
        gguf.Keys.Clip.PROJECTOR_TYPE: gguf.VisionProjectorType.IDEFICS3 if smol else "mlp",
        keys.IMAGE_SIZE: 56 if smol else 32,
        keys.PATCH_SIZE: 4 if smol else 8,
        keys.EMBEDDING_LENGTH: 24,
        keys.FEED_FORWARD_LENGTH: 96,
        keys.BLOCK_COUNT: 2 if smol else 1,
        keys.PROJECTION_DIM: 24,
        keys.Attention.HEAD_COUNT: 3,
    }
    assert expected.items() <= value.items()
    assert value.get(keys.USE_GELU) == (None if name == "llava_clip" else True)
    assert value.get(keys.Projector.SCALE_FACTOR) == (7 if smol else None)
    assert value.get(keys.PREPROC_IMAGE_SIZE) == (112 if smol else None)
    means = [0.48145466, 0.4578275, 0.40821073] if name == "llava_clip" else [0.5] * 3
    assert value[keys.IMAGE_MEAN] == pytest.approx(means)
    names = {gguf.TENSOR_NAMES[tensor] for tensor in gguf.MODEL_TENSORS[gguf.MODEL_ARCH.MMPROJ]}
    patterns = {tensor.name.rpartition(".")[0] for tensor in reader.tensors if tensor.name != "v.class_embd"}
    bare = {pattern.replace(".0", ".{bid}").replace(".1", ".{bid}").replace("mm.2", "mm.{bid}") for pattern in patterns}
    assert bare <= names
    assert {"v.class_embd", "v.pre_ln.weight"} <= {tensor.name for tensor in reader.tensors} or name != "llava_clip"


@torch.no_grad()
@pytest.mark.parametrize("name", LANGUAGE_MODELS)
def test_greedy_tokens_and_logits_are_llama_cpps(tmp_path, monkeypatch, name):
    save_language_model(name, tmp_path / "model")
    expected = FIXTURE[name]
    assert digest(tmp_path / "model") == expected["digest"], "the random weights changed: run llama_cpp.sh again"
    export(str(tmp_path / "model"), str(tmp_path / "gguf"), form="gguf", outtype="f32")
    loaded = read(tmp_path / "gguf" / "model-F32.gguf")
    model, tokenizer = load_model(loaded), tokenizer_from_state(loaded["vlm"]["tokenizer"])
    found = expected["texts"]
    assert [[*tokenizer.starts, *tokenizer.encode(text)] for text in PROMPTS] == found["prompts"]
    monkeypatch.setattr("torch.nn.functional.gelu", tabulated_gelu)
    for prompt, generated in [*zip(found["prompts"], found["generated"], strict=True)][:3]:
        assert greedy(model, prompt, {tokenizer.eos_id}) == generated
    logits = model.head(model(torch.tensor([found["prompts"][0]]))[0, -1])[:16]
    torch.testing.assert_close(logits, torch.tensor(found["logits"]), rtol=0, atol=2e-4)


@torch.no_grad()
@pytest.mark.parametrize("name", LANGUAGE_MODELS)
def test_files_of_8_bits_are_llama_cpps_with_its_rounding(tmp_path, name):
    save_language_model(name, tmp_path / "model")
    prompts, expected = FIXTURE[name]["texts"]["prompts"], FIXTURE[name]["q8_0"]
    export(str(tmp_path / "model"), str(tmp_path / "gguf"), form="gguf", outtype="q8_0")
    model = load_model(read(tmp_path / "gguf" / "model-Q8_0.gguf"))
    logits = [model.head(model(torch.tensor([prompts[0]]))[0, -1])]
    with rounding_of_llama_cpp():
        for prompt, generated in [*zip(prompts, expected["generated"], strict=True)][:3]:
            assert greedy(model, prompt, {generated[-1]} if len(generated) < LENGTH else set()) == generated
        logits.append(model.head(model(torch.tensor([prompts[0]]))[0, -1]))
    torch.testing.assert_close(logits[1][:16], torch.tensor(expected["logits"]), rtol=0, atol=2e-4)
    assert (logits[0] - logits[1]).abs().max() > 0.01  # the rounding matters


@torch.no_grad()
@pytest.mark.parametrize("name", FAMILIES)
def test_states_of_images_are_llama_cpps(models, name):
    expected = FIXTURE[name]
    assert digest(models[name] / "model") == expected["digest"], "the random weights changed: run llama_cpp.sh again"
    model, (side, size) = load_model(read(pair(models[name]))), (112, 56) if name == "smolvlm" else (32, 32)
    rng = np.random.default_rng(7)
    images = rng.integers(256, size=(16, side // 8, side // 8, 3)).astype(np.uint8).repeat(8, 1).repeat(8, 2)
    pixels = torch.from_numpy(images[:, :size, :size]).permute(0, 3, 1, 2) / 127.5 - 1  # the first tile
    states = model.encode(pixels).states[:, 0, :8]
    assert states.std() > 1
    torch.testing.assert_close(states, torch.tensor(expected["images"]["states"]), rtol=0, atol=2e-2)


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("paligemma", "llama.cpp has the projectors of LLaVA and Idefics3, not this LinearProjector"),
        ("llava_full", "drops its class token"),
        ("llava_siglip", "the projector of LLaVA has biases and the activation gelu"),
        ("llava_clip", "its merges are not those of a SentencePiece model"),
    ],
)
def test_what_llama_cpp_lacks_is_refused_before_anything_is_written(tmp_path, capsys, name, words):
    saved_image_text(tmp_path / "a", name)
    assert command(["export", str(tmp_path / "out"), "-c", str(tmp_path / "a"), "--to", "gguf"]) == 2
    message = " ".join(capsys.readouterr().err.split())
    assert words in message and "; use --to" in message, message
    assert not (tmp_path / "out").exists()


def change_file(source, target, values=None, tensors=None):
    """Writes a file with other values of the header, None leaving one out, and further tensors."""
    reader = gguf.GGUFReader(source)
    writer = gguf.GGUFWriter(target, "clip")
    for key, field in reader.fields.items():
        if key.startswith("GGUF.") or key == "general.architecture" or key in (values or {}):
            continue
        kind, *inner = field.types
        writer.add_key_value(key, field.contents(), kind, sub_type=inner[-1] if inner else None)
    for key, value in (values or {}).items():
        if value is not None:
            writer.add_uint32(key, value) if isinstance(value, int) else writer.add_string(key, value)
    for tensor in reader.tensors:
        writer.add_tensor(tensor.name, np.array(tensor.data))
    for name, tensor in (tensors or {}).items():
        writer.add_tensor(name, tensor)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return str(target)


@pytest.mark.parametrize(
    ("values", "tensors", "words"),
    [
        ({"clip.projector_type": "resampler"}, {}, "clip.projector_type is 'resampler', not one of mlp, idefics3"),
        ({"clip.vision.window_size": 7}, {}, "clip.vision.window_size is 7, a key that is not supported"),
        ({"clip.vision.block_count": None}, {}, "has no clip.vision.block_count"),
        ({"clip.vision.projection_dim": 48}, {}, "is of a llama or qwen2 or qwen3 of width 48"),
        ({"vlm.preprocess": "[["}, {}, "cannot be read"),
        ({}, {"v.blk.0.attn_q_norm.weight": np.ones(8, np.float32)}, "'v.blk.0.attn_q_norm.weight' is not one of"),
    ],
)
def test_a_projector_that_is_not_supported_is_refused_in_a_line(models, tmp_path, values, tensors, words):
    folder = models["llava_siglip"] / "gguf"
    file = change_file(folder / "mmproj-model-F32.gguf", tmp_path / "mmproj.gguf", values, tensors)
    with pytest.raises(UserError, match=r"mmproj\.gguf") as caught:
        read(join_pair(folder / "model-F32.gguf", file))
    assert words in str(caught.value) and "\n" not in str(caught.value)


def test_files_of_llama_cpps_converter_have_no_key_of_ours(models, tmp_path):
    folder = models["llava_siglip"] / "gguf"
    file = change_file(folder / "mmproj-model-F32.gguf", tmp_path / "mmproj.gguf", {"vlm.preprocess": None})
    theirs, ours = read(models["llava_siglip"] / "model"), read(join_pair(folder / "model-F32.gguf", file))
    assert ours["vlm"]["preprocess"] == theirs["vlm"]["preprocess"]


def test_mmproj_belongs_to_a_gguf_file_of_the_same_model(models, tmp_path, capsys):
    projector, image = str(models["smolvlm"] / "gguf" / "mmproj-model-F32.gguf"), photo(tmp_path)
    tokenizer = byte_pairs(320)
    save_gguf(tmp_path / "llama.gguf", wide(t.LlamaForCausalLM(small(len(tokenizer)))), tokenizer)
    export_gpt2(tmp_path)
    cases = {
        (str(models["smolvlm"] / "model"), projector): "is for GGUF files",
        (str(tmp_path / "llama.gguf"), str(tmp_path / "none.gguf")): "no such GGUF file",
        (str(tmp_path / "llama.gguf"), projector): "is of a llama of width 24",
        (str(tmp_path / "gpt2" / "model-F16.gguf"), projector): "is of a llama of width 24",
    }
    for (place, file), words in cases.items():
        assert command(["caption", image, "-c", place, "--mmproj", file]) == 2
        message = " ".join(capsys.readouterr().err.split())
        assert words in message and message.count("error:") == 1, message


def small(rows):
    sizes = {"hidden_size": 64, "num_hidden_layers": 1, "num_attention_heads": 4, "intermediate_size": 96}
    return t.LlamaConfig(**sizes, vocab_size=rows, bos_token_id=0, eos_token_id=0)


def export_gpt2(folder):
    tokenizer = byte_pairs(320)
    gpt2(len(tokenizer), 0).save_pretrained(folder / "theirs")
    tokenizer.save_pretrained(folder / "theirs")
    export(str(folder / "theirs"), str(folder / "gpt2"), form="gguf")


def test_a_checkpoint_keeps_its_chat_template(models, tmp_path):
    folder, checkpoint = models["smolvlm"], tmp_path / "a.ckpt"
    assert command(["import", str(folder / "model"), "--out", str(checkpoint)]) == 0
    export(str(checkpoint), str(tmp_path / "gguf"), form="gguf")
    fields = gguf.GGUFReader(tmp_path / "gguf" / "model-F16.gguf").fields
    assert fields[gguf.Keys.Tokenizer.CHAT_TEMPLATE].contents() == TEMPLATES["smolvlm"]


def test_python_loads_both_files(models, tmp_path):
    image = photo(tmp_path)
    model = vlm.load(pair(models["llava_siglip"]))
    assert model.predict([image], prompt="<image>\na", max_tokens=4)
