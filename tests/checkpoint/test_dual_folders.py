"""CLIP and SigLIP folders as dual encoders, beside transformers."""

import json
import shutil
from pathlib import Path

import numpy as np
import pytest
import torch
from dual import LENGTHS, embed_texts, embedded_images, saved_dual
from hugging import photos
from PIL import Image
from safetensors.torch import load_file, save_file
from text_lines import varied_lines
from transformers import AutoTokenizer, CLIPModel

import vlm
from vlm.cli.main import run
from vlm.data.text.inputs import encode_text
from vlm.errors import UserError
from vlm.tasks.contrastive.predict import DualClassifier
from vlm.tasks.contrastive.train import contrastive_loss, sigmoid_loss

NAMES = ("clip", "siglip")
EXACT = ["--precision", "fp32"]
TEXTS = ["a Photo of a DOG.", "two  cats!! run over_the green", "don't, 12 men " * 9, "", "(a)", "é ü_x", "a cat"]


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    root = tmp_path_factory.mktemp("duals")
    return {name: (root / name, *saved_dual(name, root / name)) for name in NAMES}


@pytest.mark.slow
@pytest.mark.parametrize("name", NAMES)
def test_ids_of_varied_lines_are_equal(folders, name):
    folder, _, theirs, _ = folders[name]
    ours = DualClassifier(str(folder)).tokenizer
    lines = [line for line in varied_lines(2000, seed=0) if "<" not in line]  # special tokens in a text are text here
    assert len(lines) > 1500
    differing = [line for line in lines if theirs(line, add_special_tokens=False)["input_ids"] != ours.encode(line)]
    assert not differing[:3]


@torch.no_grad()
@pytest.mark.parametrize("name", NAMES)
def test_embeddings_are_equal(folders, tmp_path, name):
    folder, model, tokenizer, processor = folders[name]
    ours, paths = DualClassifier(str(folder)), photos(tmp_path)
    truth = embed_texts(model, tokenizer, TEXTS)
    torch.testing.assert_close(ours.embed_texts(TEXTS), truth, rtol=0, atol=1e-5)
    assert (truth[0] - truth[1]).abs().max() > 0.05
    pixels = torch.randn(3, 3, 24, 24)
    images = ours.model.embed_images(pixels)
    torch.testing.assert_close(images, embedded_images(model, pixels), rtol=0, atol=1e-5)
    logits = images @ truth.T * model.logit_scale.exp()
    probabilities = logits.softmax(-1) if name == "clip" else (logits + model.logit_bias).sigmoid()
    torch.testing.assert_close(ours.model.likelihoods(images, truth).float(), probabilities, rtol=0, atol=1e-5)
    seen = processor([Image.open(path) for path in paths], return_tensors="pt").pixel_values
    mine = torch.from_numpy(np.stack(vlm.load(str(folder)).embed([*map(Path, paths)])))
    torch.testing.assert_close(mine, embedded_images(model, seen), rtol=0, atol=0.05)  # pixels differ by a grey level


@pytest.mark.slow
@pytest.mark.parametrize("name", NAMES)
def test_the_commands_take_a_folder(folders, tmp_path, capsys, name):
    folder, model, tokenizer, processor = folders[name]
    paths = [str(path) for path in photos(tmp_path)]
    labels = ["a dog", "two cats", "green grass"]
    assert run(["classify", *paths, "-c", str(folder), *EXACT, *[f"--label={one}" for one in labels]]) == 0
    rows = [line.split("\t")[1] for line in capsys.readouterr().out.splitlines()]
    with torch.no_grad():
        seen = processor([Image.open(path) for path in paths], return_tensors="pt").pixel_values
        truth = embedded_images(model, seen) @ embed_texts(model, tokenizer, labels).T
    assert all(row.startswith(labels[one]) for row, one in zip(rows, truth.argmax(1), strict=True))
    assert run(["retrieve", *paths, "-c", str(folder), "--text", "a dog", "--top", "1", *EXACT]) == 0
    assert capsys.readouterr().out.split("\t")[1] == paths[int(truth[:, 0].argmax())]
    assert run(["classify", paths[0], "-c", str(folder), *EXACT, "--label", "a dog " * 50, "--label", "a"]) == 0
    said = f"note: 1 of 2 texts: more than the {LENGTHS[name] - 1 - (name == 'clip')} tokens that the model reads"
    assert said in capsys.readouterr().err
    assert run(["embed", "--text", "a dog", "-c", str(folder), "--format", "jsonl", *EXACT]) == 0
    (line,) = capsys.readouterr().out.splitlines()
    expected = embed_texts(model, tokenizer, ["a dog"])[0].tolist()
    assert json.loads(line)["embedding"] == pytest.approx(expected, abs=1e-5)


@pytest.mark.parametrize("name", NAMES)
def test_a_folder_goes_out_again(folders, tmp_path, name):
    folder, model, tokenizer, _ = folders[name]
    assert run(["export", str(tmp_path / "out"), "--to", "huggingface", "-c", str(folder)]) == 0
    back = type(model).from_pretrained(tmp_path / "out").eval()
    assert all(torch.equal(one, other) for one, other in zip(back.parameters(), model.parameters(), strict=True))
    theirs = AutoTokenizer.from_pretrained(tmp_path / "out")
    assert theirs(TEXTS[:3])["input_ids"] == tokenizer(TEXTS[:3])["input_ids"]
    with torch.no_grad():
        assert torch.equal(embed_texts(back, theirs, TEXTS), embed_texts(model, tokenizer, TEXTS))
    again, before = (DualClassifier(str(place)).embed_texts(TEXTS) for place in (tmp_path / "out", folder))
    assert torch.equal(again, before)


def test_the_names_of_published_folders_are_read(folders, tmp_path):
    """Those hold tables of positions as whole numbers too, and an end token that their text config does not name."""
    folder, model, tokenizer, _ = folders["clip"]
    for path in folder.iterdir():
        (tmp_path / path.name).write_bytes(path.read_bytes())
    config = json.loads((tmp_path / "config.json").read_text())
    config["text_config"] |= {"bos_token_id": 0, "eos_token_id": 2, "pad_token_id": 1}
    (tmp_path / "config.json").write_text(json.dumps(config))
    ids = {f"{side}_model.embeddings.position_ids": torch.arange(LENGTHS["clip"])[None] for side in ("text", "vision")}
    save_file(load_file(tmp_path / "model.safetensors") | ids, tmp_path / "model.safetensors")
    with torch.no_grad():
        truth = embed_texts(model, tokenizer, TEXTS)
    torch.testing.assert_close(DualClassifier(str(tmp_path)).embed_texts(TEXTS), truth, rtol=0, atol=1e-5)


@pytest.mark.parametrize("name", NAMES)
def test_the_loss_of_pairs_is_theirs(folders, name):
    """Its gradients too, through both encoders."""
    folder, model, tokenizer, _ = folders[name]
    ours = DualClassifier(str(folder))
    pixels, texts = torch.randn(4, 3, 24, 24), ["a dog", "two cats", "green grass", "a red rock"]
    padding = {"padding": True} if name == "clip" else {"padding": "max_length", "max_length": LENGTHS[name]}
    inputs = tokenizer(texts, **padding, return_tensors="pt")
    if name == "siglip":
        del inputs["attention_mask"]  # it reads the padding
    truth = model(**inputs, pixel_values=pixels, return_loss=True).loss
    rows = ours.encode_rows([[encode_text(ours.tokenizer, 32, text)._replace(places=[0])] for text in texts])
    with torch.enable_grad():
        pairs = ours.model(pixels, rows.tokens, rows.segments, rows.places)
        total, count = contrastive_loss(*pairs) if name == "clip" else sigmoid_loss(*pairs, ours.model.bias)
        (total / count).backward()
    torch.testing.assert_close(total / count, truth, rtol=1e-5, atol=1e-5)
    truth.backward()
    learned = [(ours.model.log_scale, model.logit_scale)]
    learned += [(ours.model.bias, model.logit_bias)] if name == "siglip" else []
    learned += [(ours.model.text_encoder.token_embed.weight, model.text_model.embeddings.token_embedding.weight)]
    for one, other in learned:
        torch.testing.assert_close(one.grad.view_as(other), other.grad, rtol=1e-4, atol=1e-5)


@torch.no_grad()
def test_clip_reads_the_end_that_its_config_names(folders, tmp_path):
    """Or, with 2 as in old folders, the last id; any other token would be read in another place."""
    folder, _, tokenizer, _ = folders["clip"]
    shutil.copytree(folder, tmp_path / "clip")
    config = tmp_path / "clip" / "config.json"
    stated = json.loads(config.read_text())
    for end in (2, tokenizer.eos_token_id):
        config.write_text(json.dumps(stated | {"text_config": stated["text_config"] | {"eos_token_id": end}}))
        theirs = CLIPModel.from_pretrained(tmp_path / "clip").eval()
        truth = embed_texts(theirs, tokenizer, TEXTS)
        torch.testing.assert_close(DualClassifier(str(tmp_path / "clip")).embed_texts(TEXTS), truth, rtol=0, atol=1e-5)
    config.write_text(json.dumps(stated | {"text_config": stated["text_config"] | {"eos_token_id": 5}}))
    with pytest.raises(UserError, match=r"text_config\.eos_token_id is 5, but the tokenizer ends texts with"):
        DualClassifier(str(tmp_path / "clip"))
