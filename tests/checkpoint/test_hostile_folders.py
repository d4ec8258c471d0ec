"""Wrong, cut and hostile folders of Hugging Face: refused in a line each; nothing is executed or fetched."""

import json
import shutil
import socket

import pytest
import torch
from hugging import photos, saved_captioner
from safetensors.torch import load_file, save_file

from vlm.checkpoint.load import read
from vlm.cli.main import run
from vlm.errors import UserError


@pytest.fixture(scope="module")
def good(tmp_path_factory):
    torch.manual_seed(0)
    folder = tmp_path_factory.mktemp("good") / "theirs"
    saved_captioner(folder, generation={"num_beams": 2, "max_length": 8})
    return folder


@pytest.fixture
def folder(good, tmp_path):
    return shutil.copytree(good, tmp_path / "theirs")


def edit(folder, name, *path, **changes):
    whole = json.loads((folder / name).read_text())
    part = whole
    for key in path:
        part = part[key]
    part.update(changes)
    (folder / name).write_text(json.dumps(whole))


def edit_tensors(folder, change):
    tensors = load_file(folder / "model.safetensors")
    change(tensors)
    save_file(tensors, folder / "model.safetensors")


def link_out(folder, name):
    outside = folder.parent / f"outside_{name}"
    shutil.move(folder / name, outside)
    (folder / name).symlink_to(outside)


def other_vocabulary(folder):
    whole = json.loads((folder / "tokenizer.json").read_text())
    (folder / "vocab.json").write_text(json.dumps(whole["model"]["vocab"] | {"a": 290}))


def piece_twice(folder):
    whole = json.loads((folder / "tokenizer.json").read_text())
    vocab = whole["model"]["vocab"]
    vocab[max(vocab, key=vocab.get)] = 5
    (folder / "tokenizer.json").write_text(json.dumps(whole))


def shard_away(folder):
    index = {"weight_map": {"a": "model-00001-of-00002.safetensors", "b": "../../outside.safetensors"}}
    shutil.move(folder / "model.safetensors", folder / "model-00001-of-00002.safetensors")
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))


BAD = {
    "shape": (lambda f: edit(f, "config.json", "decoder", n_inner=80), "n_inner|fc1"),
    "depth": (lambda f: edit(f, "config.json", "encoder", num_hidden_layers=3), "has no encoder.encoder.layer.2"),
    "million layers": (lambda f: edit(f, "config.json", "decoder", n_layer=10**6), "depth=1000000 is out of bounds"),
    "giant vocabulary": (lambda f: edit(f, "config.json", "decoder", vocab_size=10**12), "tokenizer of 300 tokens"),
    "giant width": (lambda f: edit(f, "config.json", "encoder", hidden_size=3 * 10**9), "describes no model"),
    "giant image": (lambda f: edit(f, "config.json", "encoder", image_size=8 * 10**6), "8000000"),
    "no number": (lambda f: edit(f, "config.json", "encoder", hidden_size="os.system"), "describes no model"),
    "auto_map": (lambda f: edit(f, "config.json", auto_map={"AutoModel": "evil.Model"}), "auto_map"),
    "tokenizer code": (lambda f: edit(f, "tokenizer_config.json", auto_map={"A": "evil.T"}), "auto_map"),
    "other model": (lambda f: edit(f, "config.json", "decoder", model_type="xlnet"), "'xlnet' where gpt2"),
    "no weight": (lambda f: edit_tensors(f, lambda t: t.pop("decoder.transformer.wte.weight")), "wte.weight"),
    "cut weights": (lambda f: (f / "model.safetensors").write_bytes(b"\xff" * 100), "cannot be read"),
    "no weights": (lambda f: (f / "model.safetensors").unlink(), "has no model.safetensors"),
    "missing shard": (shard_away, "outside.safetensors cannot be read"),
    "no tokenizer": (lambda f: (f / "tokenizer.json").unlink(), "there is no tokenizer.json"),
    "smaller tokenizer": (lambda f: edit(f, "config.json", "decoder", vocab_size=299), "weights are of 299"),
    "vocabularies differ": (other_vocabulary, "disagree on the id of 'a'"),
    "an id twice": (piece_twice, "no other's"),
    "other merging": (lambda f: edit(f, "tokenizer.json", "model", byte_fallback=True), "byte_fallback"),
    "other tokenizer": (lambda f: edit(f, "tokenizer.json", "model", type="Unigram"), "a Unigram"),
    "special out of range": (lambda f: edit(f, "generation_config.json", eos_token_id=300), "outside the vocabulary"),
    "two ends": (lambda f: edit(f, "generation_config.json", eos_token_id=[1, 2]), "not one token"),
    "strange decoding": (lambda f: edit(f, "generation_config.json", forced_bos_token_id=3), "forced_bos_token_id"),
    "giant beam": (lambda f: edit(f, "generation_config.json", num_beams=10**9), "num_beams"),
    "no preprocessing": (lambda f: (f / "preprocessor_config.json").unlink(), "has no preprocessor_config.json"),
    "other images": (
        lambda f: edit(f, "preprocessor_config.json", size={"height": 32, "width": 32}),
        "makes images of 32 pixels, its model reads 24",
    ),
    "oblong images": (lambda f: edit(f, "preprocessor_config.json", size={"height": 24, "width": 32}), "no square"),
    "a deep file": (lambda f: (f / "config.json").write_text("[" * 10**5), "cannot be read"),
    **{
        f"link {name}": (lambda f, name=name: link_out(f, name), "link out of the folder")
        for name in ("config.json", "model.safetensors", "tokenizer.json", "preprocessor_config.json")
    },
}


@pytest.mark.parametrize("name", BAD)
def test_a_bad_folder_is_refused_in_one_line(folder, name, monkeypatch):
    change, words = BAD[name]
    change(folder)
    monkeypatch.setattr(socket.socket, "connect", lambda *_: pytest.fail("a connection"))
    (folder / "evil.py").write_text("raise SystemExit('executed')")
    with pytest.raises(UserError, match=words) as caught:
        read(folder)
    message = str(caught.value)
    assert "\n" not in message and (str(folder) in message or name == "missing shard")
    assert caught.value.status == 2


def test_the_command_takes_a_folder(good, tmp_path, capsys):
    paths = photos(tmp_path / "photos", count=3)
    assert run(["caption", *paths, "-c", str(good), "--device", "cpu"]) == 0
    out = capsys.readouterr().out.splitlines()
    assert [line.split("\t")[0] for line in out] == paths
    assert run(["caption", str(tmp_path / "photos"), "-c", str(good), "--sample", "--max-tokens", "4"]) == 0
    assert run(["info", "-c", str(good)]) == 0
    assert "VisionEncoderDecoderModel" in capsys.readouterr().out


def test_the_command_refuses_a_folder_in_a_line(folder, capsys):
    edit(folder, "config.json", auto_map={"AutoModel": "evil.Model"})
    assert run(["caption", "x.png", "-c", str(folder)]) == 2
    assert run(["info", "-c", str(folder)]) == 2
    assert "auto_map" in capsys.readouterr().err.splitlines()[-1]


def test_a_download_of_the_hub_is_taken_through_its_links(folder, tmp_path):
    root = tmp_path / "models--a--b"
    (root / "blobs").mkdir(parents=True)
    (root / "snapshots" / "abc").mkdir(parents=True)
    for path in folder.iterdir():
        shutil.move(path, root / "blobs" / f"hash_{path.name}")
        (root / "snapshots" / "abc" / path.name).symlink_to(f"../../blobs/hash_{path.name}")
    assert read(root / "snapshots" / "abc")["vlm"]["task"] == "captioning"
