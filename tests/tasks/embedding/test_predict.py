"""Vectors of images and texts are the states that others compute, pooled as their folders say."""

import json

import numpy as np
import pytest
import timm
import torch
from hugging import ENCODERS, photos, save_parts, saved_bert
from PIL import Image
from timm.models import save_for_hf
from tiny_checkpoints import FILES, IMAGES
from transformers import BertForMaskedLM, BertModel

import vlm
from vlm.cli.main import run
from vlm.data.text.inputs import encode_text
from vlm.errors import UserError

TEXTS = ["a man in a red shirt", "two dogs", "the children don't play in the blue water!", ""]
EXACT = {"device": "cpu", "precision": "fp32"}
OLD = {"pooling_mode_cls_token": False, "pooling_mode_mean_tokens": True, "pooling_mode_max_tokens": False}


def load(place):
    return vlm.load(place, **EXACT)


def sentences(folder, pooling, *, normalize=True, transformer="", more=(), **files):
    """Adds to a folder what sentence-transformers writes."""
    kinds = ["Transformer", "Pooling", *more, *(["Normalize"] if normalize else [])]
    paths = [transformer, *(f"{at}_{kind}" for at, kind in enumerate(kinds[1:], start=1))]
    pairs = zip(paths, kinds, strict=True)
    modules = [{"idx": 0, "name": "0", "path": path, "type": f"a.b.{kind}"} for path, kind in pairs]
    (folder / "modules.json").write_text(json.dumps(modules))
    (folder / "1_Pooling").mkdir()
    (folder / "1_Pooling" / "config.json").write_text(json.dumps(pooling))
    for name, content in files.items():
        (folder / f"{name}.json").write_text(json.dumps(content))


def truth_of(model, tokenizer, texts, *, pooling="mean", normalize=True, longest=64):
    """Text by text, without padding."""
    found = []
    for text in texts:
        tokens = tokenizer(text, truncation=True, max_length=longest, return_tensors="pt")
        (states,) = model.base_model(**tokens).last_hidden_state
        found.append(states.mean(0) if pooling == "mean" else states[0])
    vectors = torch.stack(found)
    return (torch.nn.functional.normalize(vectors, dim=-1) if normalize else vectors).numpy()


@torch.no_grad()
@pytest.mark.parametrize(
    ("files", "options", "truth"),
    [
        (None, {}, {"normalize": False}),
        (None, {"pooling": "first", "normalize": True}, {"pooling": "first"}),
        ((OLD,), {}, {}),
        (({"pooling_mode": "mean"},), {}, {}),
        (({"pooling_mode": "cls"},), {}, {"pooling": "first"}),
        (({"pooling_mode": "cls"},), {"pooling": "mean", "normalize": False}, {"normalize": False}),
        (({"pooling_mode": "mean"}, {"normalize": False}), {}, {"normalize": False}),
        (({"pooling_mode": "mean"}, {"sentence_bert_config": {"max_seq_length": 6}}), {}, {"longest": 6}),
        (({"pooling_mode": "mean"}, {"tokenizer_config": {"model_max_length": 5}}), {}, {"longest": 5}),
    ],
)
def test_vectors_of_texts_are_the_pooled_states_of_transformers(tmp_path, files, options, truth):
    """One that sentence-transformers describes gives vectors even with a head."""
    model, tokenizer = saved_bert(tmp_path, BertModel if files is None else BertForMaskedLM)
    if files is not None:
        sentences(tmp_path, files[0], **(files[1] if len(files) > 1 else {}))
    ours = load(tmp_path)
    assert ours.task == "embedding"
    found = np.stack(ours.embed(TEXTS, **options))
    np.testing.assert_allclose(found, truth_of(model, tokenizer, TEXTS, **truth), rtol=0, atol=1e-5)
    np.testing.assert_allclose(ours.embed(TEXTS[2], **options), found[2], rtol=0, atol=1e-6)


@torch.no_grad()
@pytest.mark.parametrize("name", ["vit", "clip_vision", "siglip"])
def test_vectors_of_images_are_the_class_token_or_the_mean(tmp_path, name):
    theirs, _ = save_parts(tmp_path / "theirs", ENCODERS[name]())
    ours, paths = load(tmp_path / "theirs"), photos(tmp_path / "photos")
    pixels = torch.stack([ours._predictor.pixels(Image.open(path)) for path in paths])
    states = theirs(pixel_values=ours._predictor.preprocess.normalize(pixels)).last_hidden_state
    states = theirs.post_layernorm(states) if name == "clip_vision" else states
    for options, truth in (
        ({}, states.mean(1) if name == "siglip" else states[:, 0]),
        ({"pooling": "mean"}, states.mean(1)),
        ({"pooling": "first"}, states[:, 0]),
    ):
        np.testing.assert_allclose(ours.embed([*map(str, paths)], **options), truth, rtol=0, atol=1e-4)


@pytest.mark.slow
@torch.no_grad()
@pytest.mark.parametrize("name", ["test_vit", "test_resnet", "test_efficientnet", "test_convnext"])
def test_a_folder_of_timm_gives_timms_own_features(tmp_path, name):
    torch.manual_seed(0)
    model = timm.create_model(name, num_classes=5).eval()
    model(torch.randn(8, 3, *model.pretrained_cfg["input_size"][1:]))
    save_for_hf(model, tmp_path, safe_serialization=True)
    ours = load(tmp_path)
    preprocess, own = ours._predictor.preprocess, timm.data.resolve_data_config(model=model)
    assert (preprocess.image_size, preprocess.interpolation) == (own["input_size"][1:], own["interpolation"])
    assert (preprocess.mean, preprocess.std, preprocess.crop) == ([*own["mean"]], [*own["std"]], own["crop_pct"])
    pixels = torch.stack([preprocess(Image.open(path)) for path in IMAGES])
    model.reset_classifier(0)
    truth = model(preprocess.normalize(pixels)).numpy()
    assert truth.std() > 1e-3
    np.testing.assert_allclose(ours.embed(IMAGES), truth, rtol=0, atol=1e-6)
    assert run(["import", str(tmp_path), "--out", str(tmp_path / "whole.ckpt")]) == 0
    np.testing.assert_allclose(load(tmp_path / "whole.ckpt").embed(IMAGES[1]), truth[1], rtol=0, atol=1e-6)


@torch.no_grad()
def test_a_dual_encoder_gives_its_embeddings_of_images_and_texts(tmp_path, monkeypatch, capsys):
    """Their products are the similarities that `retrieve` ranks by."""
    path = FILES / "contrastive.ckpt"
    ours, texts = load(path), ["a red circle", "a blue cross"]
    images = np.stack(ours.embed(np.stack([np.asarray(Image.open(one).convert("RGB")) for one in IMAGES])))
    vectors = np.stack(ours.embed(texts))
    for text, vector in zip(texts, vectors, strict=True):
        ranked = dict(ours.retrieve(IMAGES, text=text, top=3)[0])
        for image, own in zip(IMAGES, images, strict=True):
            assert ranked[image] == pytest.approx(float(own @ vector), abs=1e-5)
    flags = ["--device", "cpu", "--precision", "fp32", "--format", "jsonl", "-c", str(path)]
    assert run(["embed", IMAGES[0], "--text", texts[1], *flags]) == 0
    image, text = map(json.loads, capsys.readouterr().out.splitlines())
    assert (image["input"], text["input"]) == (IMAGES[0], texts[1])
    np.testing.assert_allclose(image["embedding"], images[0], rtol=0, atol=1e-6)
    np.testing.assert_allclose(text["embedding"], vectors[1], rtol=0, atol=1e-6)


@torch.no_grad()
@pytest.mark.parametrize("task", ["classification", "text_classification"])
def test_a_classifier_gives_what_its_head_reads(task):
    ours = load(FILES / f"{task}.ckpt")
    inputs = IMAGES if task == "classification" else ["a red dot", "x y"]
    probabilities = ours.module.head(torch.from_numpy(np.stack(ours.embed(inputs)))).softmax(-1)
    found = [dict(zip(ours._predictor.classes, row.tolist(), strict=True)) for row in probabilities]
    if task == "classification":
        truth = [dict(one.top) for one in ours.classify(inputs, top=100)]
    else:
        rows = ours._predictor.encode_rows([[encode_text(ours._predictor.tokenizer, 120, text)] for text in inputs])
        logits = ours.module(rows.tokens, rows.segments, rows.types, rows.layout)
        truth = [dict(zip(ours._predictor.classes, row.tolist(), strict=True)) for row in logits.softmax(-1)]
    for one, other in zip(found, truth, strict=True):
        assert one == pytest.approx(other, abs=1e-5)


OTHERS = ["captioning", "image_questions", "masked_language_modeling", "tagging", "translation"]


@torch.no_grad()
@pytest.mark.parametrize("task", OTHERS)
def test_other_models_give_the_mean_of_their_encoders_states(task):
    ours = load(FILES / f"{task}.ckpt")
    if task in ("captioning", "image_questions"):
        inputs, preprocess = IMAGES[:1], ours._predictor.preprocess
        read = preprocess.normalize(preprocess(Image.open(IMAGES[0]))[None])
    else:
        inputs, tokenizer = ["a small red circle"], ours._predictor.tokenizer
        read = torch.tensor([[tokenizer.bos_id, *tokenizer.encode(inputs[0]), tokenizer.eos_id]])
    states = ours.module.encoder(read).states
    np.testing.assert_allclose(ours.embed(inputs)[0], states[0].mean(0), rtol=0, atol=1e-5)


def embed(*words, status=0):
    assert run(["embed", *map(str, words), "--device", "cpu", "--precision", "fp32"]) == status


def test_files_hold_the_same_vectors(tmp_path, capsys):
    parquet = pytest.importorskip("pyarrow.parquet")
    path, missing, truth = FILES / "classification.ckpt", tmp_path / "none.png", load(FILES / "classification.ckpt")
    vectors = np.stack(truth.embed(IMAGES))
    inputs = [IMAGES[0], missing, *IMAGES[1:], "-c", path]
    for name in ("a.npy", "a.parquet", "a.jsonl", "a.csv"):
        form = name.partition(".")[2]
        embed(*inputs, "--out", tmp_path / name, *(["--format", form] if form in ("jsonl", "csv") else []), status=1)
        assert f"{missing}: No such file" in capsys.readouterr().err
    rows = np.load(tmp_path / "a.npy")
    assert rows.dtype == np.float32 and np.isnan(rows[1]).all() and len(rows) == len(IMAGES) + 1
    np.testing.assert_array_equal(np.delete(rows, 1, 0), vectors)
    table = parquet.read_table(tmp_path / "a.parquet").to_pylist()
    lines = [json.loads(line) for line in (tmp_path / "a.jsonl").read_text().splitlines()]
    assert [one["input"] for one in table] == [one["input"] for one in lines] == IMAGES
    for found in (table, lines):
        np.testing.assert_array_equal(np.array([one["embedding"] for one in found], np.float32), vectors)
    cells = [line.split(",")[1].split(" ") for line in (tmp_path / "a.csv").read_text().splitlines()[1:]]
    np.testing.assert_array_equal(np.array(cells, np.float32), vectors)


def test_lines_of_files_and_of_stdin_are_texts(tmp_path, capsys, monkeypatch):
    (tmp_path / "texts.txt").write_text("a red circle\na blue cross\n")
    path = FILES / "embedding.ckpt"
    embed(tmp_path / "texts.txt", "--text", "a dot", "-c", path)
    said = capsys.readouterr().out
    monkeypatch.setattr("sys.stdin", iter(["a red circle\n", "a blue cross\n", "a dot\n"]))
    embed("-c", path)
    assert said == capsys.readouterr().out
    names, vectors = zip(*(line.split("\t") for line in said.splitlines()), strict=True)
    assert names == ("a red circle", "a blue cross", "a dot")
    embed("--text", "a red circle " * 200, "-c", path)
    assert "note: 1 of 1 texts: more than" in capsys.readouterr().err
    assert [np.linalg.norm([float(x) for x in one.split(" ")]) for one in vectors] == pytest.approx([1] * 3, abs=1e-5)


@pytest.mark.parametrize(
    ("words", "line"),
    [
        (["-c", FILES / "language_modeling.ckpt"], "contains a model for language_modeling, not for"),
        (["--pooling", "max", "-c", FILES / "embedding.ckpt"], "--pooling: 'max' is unknown; choose mean or first"),
        (["--format", "npy", "-c", FILES / "embedding.ckpt"], "--format npy needs --out FILE"),
        (["--format", "xml", "-c", FILES / "embedding.ckpt"], "--format: 'xml' is unknown"),
    ],
)
def test_wrong_uses_are_lines(capsys, words, line):
    embed("--text", "a", *words, status=2)
    assert line in capsys.readouterr().err


DAMAGED = ["[", "{}", "3", '[{"type": "Transformer"}]', "[[[]]]"]


@pytest.mark.parametrize(
    ("stated", "line"),
    [
        *((content, r"modules\.json") for content in DAMAGED),
        ({"pooling": {"pooling_mode": "max"}}, r"1_Pooling/config.json: pools by 'max'; supported are mean and cls"),
        ({"pooling": {"pooling_mode": ["mean", "cls"]}}, "pools by"),
        ({"pooling": {**OLD, "pooling_mode_cls_token": True}}, "pools by"),
        ({"pooling": {"pooling_mode": 3}}, "pools by 3"),
        (
            {"pooling": OLD, "more": ["Dense"]},
            "modules.json: lists Transformer, Pooling, Dense, Normalize; supported are",
        ),
        ({"pooling": OLD, "transformer": "0_Transformer"}, "a Transformer in the folder itself"),
        ({"pooling": OLD, "sentence_bert_config": {"do_lower_case": True}}, "sentence_bert_config.json: do_lower_case"),
        ({"pooling": OLD, "config_sentence_transformers": {"default_prompt_name": "query"}}, "default_prompt_name is"),
    ],
)
def test_what_a_folder_asks_for_and_is_not_done_is_a_line(tmp_path, stated, line):
    saved_bert(tmp_path, BertModel)
    if isinstance(stated, str):
        (tmp_path / "modules.json").write_text(stated)
    else:
        sentences(tmp_path, **stated)
    with pytest.raises(UserError, match=line) as caught:
        load(tmp_path)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("change", "line"),
    [
        ({"architecture": "no_such_net"}, "timm has no backbone 'no_such_net'"),
        ({"architecture": "hf-hub:a/b"}, "timm has no backbone"),
        ({"model_args": {"depth": 9}}, "model_args.depth is 9, which vlm does not pass to timm"),
        ({"pretrained_cfg": {"input_size": [1, 160, 160]}}, "input_size is .*, where vlm supports 3 channels only"),
        ({"pretrained_cfg": {"mean": "x"}}, "pretrained_cfg.mean is 'x', not a list of 3 numbers"),
        (
            {"architecture": "test_resnet"},
            r"blocks\.0\.attn\.proj\.bias in .* is not a known tensor of test_resnet",
        ),
    ],
)
def test_a_folder_of_timm_that_cannot_be_used_is_a_line(tmp_path, change, line):
    save_for_hf(timm.create_model("test_vit", num_classes=5), tmp_path, safe_serialization=True)
    config = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(config | change))
    with pytest.raises(UserError, match=line) as caught:
        load(tmp_path)
    assert "\n" not in str(caught.value)


def test_an_encoder_of_images_is_served(tmp_path):
    pytest.importorskip("fastapi")
    from services import client, encode_file

    save_parts(tmp_path, ENCODERS["vit"]())
    answer = client(str(tmp_path)).post("/predict", json={"images": [encode_file(IMAGES[0])], "pooling": "mean"})
    assert answer.status_code == 200, answer.text
    truth = load(tmp_path).embed(IMAGES[0], pooling="mean")
    np.testing.assert_allclose(answer.json()["results"][0], truth, rtol=0, atol=1e-4)
