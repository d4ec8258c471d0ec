"""Wrong, cut and hostile folders of Hugging Face: refused in a line each; nothing is executed or fetched."""

import json
import shutil
import socket
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from hugging import CAPTIONERS, CLASSIFIERS, photos, saved, saved_bert, saved_decoder
from safetensors.torch import load_file, save_file
from transformers import BertForMaskedLM

from vlm.checkpoint.load import read
from vlm.cli.main import run
from vlm.errors import UserError


class Kind(NamedTuple):
    """A kind of folder, and where its files say what.

    Args:
        save: Saves one.
        image, text: The parts of config.json that describe its stack of images, and that of texts; None for none.
        inner: Name of the width of an MLP of the stack of texts, or of images where that is all.
        depth: Name of its number of layers.
        weight: A tensor.
        generation: The file with its options of decoding, and the part of it; None for none.
        end: Name of the id that ends a text.
    """

    save: Callable[[Path], Any]
    image: tuple[str, ...] | None
    text: tuple[str, ...] | None
    weight: str
    inner: str = "intermediate_size"
    depth: str = "num_hidden_layers"
    generation: tuple[str, ...] | None = None
    end: str = "eos_token_id"


GENERATION = ("generation_config.json",)
GPT2: dict[str, Any] = {"inner": "n_inner", "depth": "n_layer", "generation": GENERATION}
KINDS = {
    "vit_gpt2": Kind(CAPTIONERS["vit_gpt2"], ("encoder",), ("decoder",), "decoder.transformer.wte.weight", **GPT2),
    "deit_gpt2": Kind(CAPTIONERS["deit_gpt2"], ("encoder",), ("decoder",), "encoder.embeddings.cls_token", **GPT2),
    "blip": Kind(
        CAPTIONERS["blip"],
        ("vision_config",),
        ("text_config",),
        "text_decoder.cls.predictions.bias",
        generation=("config.json", "text_config"),
        end="sep_token_id",
    ),
    "git": Kind(CAPTIONERS["git"], ("vision_config",), (), "output.bias", generation=GENERATION),
    "llama": Kind(
        lambda folder: saved_decoder(folder, "llama"),
        None,
        (),
        "model.layers.1.self_attn.q_proj.weight",
        generation=GENERATION,
    ),
    "bert": Kind(lambda folder: saved_bert(folder, BertForMaskedLM), None, (), "cls.predictions.bias"),
    "deit": Kind(lambda folder: saved(folder, CLASSIFIERS["deit_teacher"]()), (), None, "cls_classifier.weight"),
    "dinov2": Kind(
        lambda folder: saved(folder, CLASSIFIERS["dinov2"]()),
        (),
        None,
        "dinov2.encoder.layer.0.layer_scale1.lambda1",
        inner="mlp_ratio",
    ),
}


@pytest.fixture(scope="module")
def saved_folders(tmp_path_factory):
    """A good folder of each kind."""
    torch.manual_seed(0)
    root = tmp_path_factory.mktemp("good")
    for name, kind in KINDS.items():
        kind.save(root / name)
    return root


@pytest.fixture(scope="module")
def good(saved_folders):
    return saved_folders / "vit_gpt2"


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
    (folder / "vocab.json").write_text(json.dumps(whole["model"]["vocab"] | {"a": 90}))


def piece_twice(folder):
    whole = json.loads((folder / "tokenizer.json").read_text())
    vocab = whole["model"]["vocab"]
    vocab[max(vocab, key=vocab.get)] = 5
    (folder / "tokenizer.json").write_text(json.dumps(whole))


def shard_away(folder):
    index = {"weight_map": {"a": "model-00001-of-00002.safetensors", "b": "../../outside.safetensors"}}
    shutil.move(folder / "model.safetensors", folder / "model-00001-of-00002.safetensors")
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))


Case = tuple[Callable[[Path], Any], str]
CONFIG, IMAGES = "config.json", "preprocessor_config.json"
OF_ALL: dict[str, Case] = {
    "auto_map": (lambda f: edit(f, CONFIG, auto_map={"AutoModel": "evil.Model"}), "auto_map"),
    "other kind": (lambda f: edit(f, CONFIG, model_type="../vit"), "of type '../vit'"),
    "cut weights": (lambda f: (f / "model.safetensors").write_bytes(b"\xff" * 100), "cannot be read"),
    "no weights": (lambda f: (f / "model.safetensors").unlink(), "has no model.safetensors"),
    "missing shard": (shard_away, "outside.safetensors cannot be read"),
    "a deep file": (lambda f: (f / CONFIG).write_text("[" * 10**5), "cannot be read"),
    "link config": (lambda f: link_out(f, CONFIG), "link out of the folder"),
    "link weights": (lambda f: link_out(f, "model.safetensors"), "link out of the folder"),
}


def of_layers(kind: Kind) -> Iterator[tuple[str, Case]]:
    """Sizes of a stack that are not those of its weights, or of none."""
    part = kind.image if kind.text is None else kind.text
    assert part is not None
    vast, layer = {kind.depth: 10**6}, {kind.depth: 3}
    yield "shape", (lambda f: edit(f, CONFIG, *part, **{kind.inner: 80}), "fc1")
    yield "depth", (lambda f: edit(f, CONFIG, *part, **layer), "has no .*[.]2[.]")
    yield "million layers", (lambda f: edit(f, CONFIG, *part, **vast), "is 1000000, not a whole number from 1 to 1000")
    yield (
        "no number",
        (lambda f: edit(f, CONFIG, *part, **{kind.depth: "os.system"}), "is 'os.system', not"),
    )
    yield "no weight", (lambda f: edit_tensors(f, lambda t: t.pop(kind.weight)), f"{kind.weight}|has no weights for")


def of_images(kind: Kind) -> Iterator[tuple[str, Case]]:
    part = kind.image
    assert part is not None
    undivided = {"size": {"height": 30, "width": 30}, "crop_size": {"height": 30, "width": 30}}
    yield (
        "giant width",
        (lambda f: edit(f, CONFIG, *part, hidden_size=3 * 10**9), "hidden_size is 3000000000, not"),
    )
    yield "no preprocessing", (lambda f: (f / IMAGES).unlink(), "has no preprocessor_config.json")
    oblong = {"size": {"height": 24, "width": 30}}
    yield "other images", (lambda f: edit(f, IMAGES, **undivided), "images of 30 pixels, its model reads 24|not divide")
    yield (
        "oblong images",
        (lambda f: edit(f, IMAGES, **oblong), r"24 pixels out of \[24, 30\]|images of \[24, 30\]|not divide"),
    )
    yield (
        "giant resize",
        (
            lambda f: edit(f, IMAGES, size={"shortest_edge": 10**9}, do_center_crop=True),
            "is 1000000000, not",
        ),
    )
    yield "link images", (lambda f: link_out(f, IMAGES), "link out of the folder")


def of_texts(kind: Kind) -> Iterator[tuple[str, Case]]:
    part, tokens = kind.text, "tokenizer.json"
    assert part is not None
    yield (
        "giant vocabulary",
        (lambda f: edit(f, CONFIG, *part, vocab_size=10**12), "vocab_size is 1000000000000"),
    )
    yield "smaller tokenizer", (lambda f: edit(f, CONFIG, *part, vocab_size=99), "weights are of 99")
    yield "tokenizer code", (lambda f: edit(f, "tokenizer_config.json", auto_map={"A": "evil.T"}), "auto_map")
    yield "no tokenizer", (lambda f: (f / tokens).unlink(), "there is no tokenizer.json")
    yield "vocabularies differ", (other_vocabulary, "disagree on the id of 'a'")
    yield "an id twice", (piece_twice, "not unique")
    yield "other tokenizer", (lambda f: edit(f, tokens, "model", type="Unigram"), "tokenizer in .* cannot be used")
    yield "link tokenizer", (lambda f: link_out(f, tokens), "link out of the folder")


def of_writing(kind: Kind) -> Iterator[tuple[str, Case]]:
    assert kind.generation is not None
    name, *path = kind.generation
    yield "special out of range", (lambda f: edit(f, name, *path, **{kind.end: 900}), "outside the vocabulary")
    yield "an end of many", (lambda f: edit(f, name, *path, **{kind.end: [1, 900]}), "outside the vocabulary")
    yield "no end", (lambda f: edit(f, name, *path, **{kind.end: "end"}), "not a token or a few")
    yield "strange decoding", (lambda f: edit(f, name, *path, forced_bos_token_id=3), "forced_bos_token_id")
    yield "giant beam", (lambda f: edit(f, name, *path, num_beams=10**9), "num_beams")


def cases() -> Iterator[tuple[str, str, Case]]:
    for name, kind in KINDS.items():
        found = OF_ALL | dict(of_layers(kind))
        found |= {} if kind.image is None else dict(of_images(kind))
        found |= {} if kind.text is None else dict(of_texts(kind))
        found |= {} if kind.generation is None else dict(of_writing(kind))
        yield from ((name, what, case) for what, case in found.items())
    other = (lambda f: edit(f, CONFIG, "decoder", model_type="xlnet"), "'xlnet', where gpt2")
    pattern = {"type": "Split", "pattern": {"Regex": "(a|a)*$"}, "behavior": "Isolated", "invert": False}
    merging = (lambda f: edit(f, "tokenizer.json", pre_tokenizer=pattern), "pattern '.a.a...' is not among those")
    vast = (
        lambda f: edit(f, CONFIG, "encoder", image_size=8 * 10**6),
        "image_size is 8000000",
    )
    yield from (
        ("vit_gpt2", "giant image", vast),
        ("vit_gpt2", "other decoder", other),
        ("vit_gpt2", "other merging", merging),
    )
    yield "git", "films", (lambda f: edit(f, CONFIG, num_image_with_embedding=6), "num_image_with_embedding is 6")
    name = "dinov2.embeddings.position_embeddings"
    oblong = (lambda f: edit_tensors(f, lambda t: t.update({name: t[name][:, :-1].clone()})), "positions.weight is")
    yield "dinov2", "an oblong grid", oblong
    yield "dinov2", "gated", (lambda f: edit(f, CONFIG, use_swiglu_ffn=True), "use_swiglu_ffn is True")


CASES = {f"{name}: {what}": (name, what, *case) for name, what, case in cases()}


@pytest.mark.parametrize("case", CASES)
def test_a_bad_folder_is_refused_in_one_line(saved_folders, tmp_path, case, monkeypatch):
    name, what, change, words = CASES[case]
    folder = shutil.copytree(saved_folders / name, tmp_path / "theirs")
    change(folder)
    monkeypatch.setattr(socket.socket, "connect", lambda *_: pytest.fail("a connection"))
    (folder / "evil.py").write_text("raise SystemExit('executed')")
    with pytest.raises(UserError, match=words) as caught:
        read(folder)
    message = str(caught.value)
    assert "\n" not in message and (str(folder) in message or what == "missing shard")
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
