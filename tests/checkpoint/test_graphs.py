"""Graphs for ONNX Runtime and torch.export: they compute what the models compute, by what graphs.json says alone."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

import vlm
from vlm.checkpoint.export import export
from vlm.checkpoint.load import load_model, read
from vlm.cli.main import run as command
from vlm.data.shapes.scene_captions import main as draw
from vlm.data.text.tokenizer import tokenizer_from_state
from vlm.errors import UserError
from vlm.models.context import Context, Prefix
from vlm.models.decoder import Decoder
from vlm.models.encoder_decoder import TextToText, VisionLanguageModel
from vlm.models.graphs import Graph, graphs_of, step_graph
from vlm.models.recurrent import RecurrentEncoder
from vlm.models.text_encoder import TextEncoder
from vlm.models.vit import ViT
from vlm.nn.position import (
    LearnedPositions,
    LearnedPositionsEachLayer,
    RelativeBias,
    RotaryPositions,
    SinusoidalPositions,
)

ROOT = Path(__file__).parents[2]
FILES, SAMPLE = Path(__file__).with_name("files"), ROOT / "data" / "sample"
SIZES = {"vocab_size": 23, "max_len": 16, "dim": 16, "depth": 2, "num_heads": 4}
LLAMA = {"num_kv_heads": 2, "norm": "rms", "activation": "swiglu", "bias": False}
DECODERS: dict[str, dict[str, Any]] = {
    "GPT-2": {},
    "Llama": LLAMA | {"positions": RotaryPositions(head_dim=4)},
    "relative": {"positions": RelativeBias(num_heads=4, max_len=9)},
    "each layer": {"positions": LearnedPositionsEachLayer(head_dim=4, max_len=16), "qk_norm": True},
    "post-norm": {"positions": SinusoidalPositions(dim=16), "pre_norm": False, "embed_norm": True},
}


def zeros(graph: Graph | dict[str, Any], rows: int) -> dict[str, torch.Tensor]:
    """Keys and values before a text, by a graph or by its description."""
    inputs = graph["inputs"] if isinstance(graph, dict) else {n: {"shape": p.shape} for n, p in graph.inputs.items()}
    sizes = {"batch": rows, "past": 0}
    shapes = {name: port["shape"] for name, port in inputs.items() if name.startswith("past")}
    return {name: torch.zeros([sizes.get(size, size) for size in shape]) for name, shape in shapes.items()}


def in_steps(step: Graph, tokens: torch.Tensor, lengths: list[int], **fixed: torch.Tensor) -> list[torch.Tensor]:
    """Logits after each part of some rows."""
    state = zeros(step, len(tokens)) | {"starts": torch.zeros(len(tokens), dtype=torch.long)} | fixed
    found = []
    for part in tokens.split(lengths, dim=1):
        logits, *caches = step.function(tokens=part, **state)
        state |= dict(zip(zeros(step, 1), caches, strict=True))
        found.append(logits)
    return found


@torch.no_grad()
@pytest.mark.parametrize("kind", DECODERS)
def test_a_step_is_the_model_on_whole_rows(kind: str) -> None:
    torch.manual_seed(0)
    decoder = Decoder(**SIZES | DECODERS[kind]).eval()
    tokens = torch.randint(3, 23, (3, 9))
    expected = decoder.head(decoder(tokens))
    step = step_graph(decoder)
    assert expected.std() > 0.1
    for lengths in ([1] * 9, [4, 1, 3, 1], [9]):
        ends = torch.tensor(lengths).cumsum(0) - 1
        torch.testing.assert_close(torch.stack(in_steps(step, tokens, lengths), 1), expected[:, ends])
    # A shorter row is aligned to the right: what stands before it changes nothing.
    starts, short = torch.tensor([0, 4, 8]), tokens.clone()
    for row, start in enumerate(starts.tolist()):
        short[row, :start] = 7
    for row, start in enumerate(starts.tolist()):
        own = decoder.head(decoder(tokens[row : row + 1, start:]))[0, -1]
        for lengths in ([9], [6, 1, 1, 1]):
            torch.testing.assert_close(in_steps(step, short, lengths, starts=starts)[-1][row], own)


@torch.no_grad()
@pytest.mark.parametrize("options", [{}, {"counted": True}, {"counted": True, "causal": True}, None], ids=str)
def test_an_encoder_gives_what_the_step_takes(options: dict[str, bool] | None) -> None:
    torch.manual_seed(1)
    size = (16, 24)
    vit = ViT(image_size=size, patch_size=8, dim=16, depth=1, num_heads=2)
    fusion: Any = {"context_dim": 16} if options is None else {"prefix": Prefix(dim=16, context_dim=16, **options)}
    for positions in (LearnedPositions(dim=16, max_len=24), RelativeBias(num_heads=4, max_len=9)):
        model = VisionLanguageModel(encoder=vit, decoder=Decoder(**SIZES, **fusion, positions=positions)).eval()
        encoder, step = graphs_of(model, image_size=size)
        images, tokens = torch.randn(3, 3, *size), torch.randint(3, 23, (3, 6))
        fixed = dict(zip(encoder.outputs, encoder.function(images=images), strict=True))
        assert set(fixed) <= set(step.inputs)
        expected = model.head(model(images, tokens))
        assert (expected[0] - expected[1]).abs().max() > 0.01
        torch.testing.assert_close(in_steps(step, tokens, [2, 1, 3], **fixed)[-1], expected[:, -1])


@torch.no_grad()
def test_texts_of_several_lengths_do_not_see_their_padding() -> None:
    torch.manual_seed(2)
    reader = TextEncoder(vocab_size=23, max_len=16, dim=16, depth=1, num_heads=2)
    model = TextToText(encoder=reader, decoder=Decoder(**SIZES, context_dim=16)).eval()
    encoder, step = graphs_of(model)
    texts, tokens = torch.randint(3, 23, (2, 7)), torch.randint(3, 23, (2, 4))
    mask = torch.arange(7) < torch.tensor([[7], [3]])
    fixed = dict(zip(encoder.outputs, encoder.function(tokens=texts, mask=mask), strict=True))
    found = in_steps(step, tokens, [4], **fixed)[-1]
    for row, length in enumerate((7, 3)):
        context: Context = reader(texts[row : row + 1, :length])
        expected = model.head(model.decoder(tokens[row : row + 1], None, context))[0, -1]
        torch.testing.assert_close(found[row], expected)


def open_graphs(folder: Path) -> tuple[dict[str, Any], dict[str, Any]]:
    """graphs.json, and a function for each graph, as ONNX Runtime or torch runs it."""
    about = json.loads((folder / "graphs.json").read_text())

    def function(one: dict[str, Any]) -> Any:
        if one["file"].endswith("pt2"):
            module = torch.export.load(folder / one["file"]).module()
            return lambda **inputs: module(*(inputs[name] for name in one["inputs"]))
        session = pytest.importorskip("onnxruntime").InferenceSession(folder / one["file"])
        assert [port.name for port in session.get_outputs()] == [*one["outputs"]]
        assert {port.name: port.shape for port in session.get_inputs()} == {
            name: port["shape"] for name, port in one["inputs"].items()
        }
        return lambda **inputs: map(torch.from_numpy, session.run(None, {n: t.numpy() for n, t in inputs.items()}))

    return about, {name: function(one) for name, one in about["graphs"].items()}


@pytest.mark.slow
@torch.no_grad()
@pytest.mark.parametrize("form", ["onnx", "pt2"])
def test_a_captioner_without_vlm(tmp_path: Path, form: str) -> None:
    """Logits of steps with growing caches, of several numbers of rows and lengths; and all that graphs.json says."""
    pytest.importorskip("onnxscript")
    path, folder = FILES / "captioning.ckpt", tmp_path / "out"
    assert command(["export", str(folder), "-c", str(path), "--to", form]) == 0
    about, graphs = open_graphs(folder)
    assert about["image"].items() >= {"image_size": 32, "resize": "crop", "mean": [0.5] * 3, "std": [0.5] * 3}.items()
    assert about["tokens"] == {"pad": 0, "bos": 1, "eos": 2, "unk": None, "mask": None, "vocab_size": 259}
    assert about["writes"].items() >= {"begin": [1], "ends": [2], "max_tokens": 30, "max_len": 32}.items()
    assert "graphs.json" in (folder / "README.md").read_text()
    torch.manual_seed(0)
    model = load_model(read(path))
    for rows, lengths in ((1, [1, 1, 1, 1]), (3, [1, 2, 1]), (8, [5])):
        images, tokens = torch.randn(rows, 3, 32, 32), torch.randint(3, 259, (rows, sum(lengths)))
        state = zeros(about["graphs"]["step"], rows)
        past, state["starts"] = [*state], torch.zeros(rows, dtype=torch.long)
        state |= dict(zip(about["graphs"]["encoder"]["outputs"], graphs["encoder"](images=images), strict=True))
        whole, end = model.head(model(images, tokens)), 0
        for part in tokens.split(lengths, dim=1):
            logits, *caches = graphs["step"](tokens=part, **state)
            state |= dict(zip(past, caches, strict=True))
            end += part.shape[1]
            torch.testing.assert_close(logits, whole[:, end - 1], atol=1e-4, rtol=0)


@pytest.mark.sample(slow=4)
@torch.no_grad()
@pytest.mark.parametrize("form", ["onnx", "pt2"])
@pytest.mark.parametrize("task", ["classification", "contrastive", "embedding", "tagging", "masked_language_modeling"])
def test_heads_and_encoders(tmp_path: Path, task: str, form: str) -> None:
    """Of texts that are filled up, against the models themselves on each alone."""
    pytest.importorskip("onnxscript")
    path, folder = FILES / f"{task}.ckpt", tmp_path / "out"
    export(str(path), str(folder), form=form)
    (about, graphs), model = open_graphs(folder), load_model(read(path))

    def run(name: str, **inputs: torch.Tensor) -> list[torch.Tensor]:
        return list(graphs[name](**inputs))

    torch.manual_seed(0)
    images, tokens = torch.randn(3, 3, 32, 32), torch.randint(3, 40, (2, 5))
    texts = {"tokens": tokens, "mask": torch.tensor([[True] * 5, [True] * 3 + [False] * 2])}
    if any("types" in graph["inputs"] for graph in about["graphs"].values()):
        texts["types"] = torch.zeros_like(tokens)
    rows = [tokens[:1], tokens[1:, :3]]
    if task == "classification":
        probabilities = run("model", images=images)[0].softmax(-1)
        torch.testing.assert_close(probabilities, model(images).softmax(-1), atol=1e-5, rtol=0)
        assert about["classes"][:2] == ["red circle", "red triangle"]
    elif task == "masked_language_modeling":
        found = run("model", **texts, places=torch.tensor([2, 5]))[0]
        gaps = [torch.tensor([2]), torch.tensor([0])]
        expected = [model.head.logits(model(row, None, None, gap)) for row, gap in zip(rows, gaps, strict=True)]
        torch.testing.assert_close(found, torch.cat(expected), atol=1e-4, rtol=0)
    elif task == "contrastive":
        one = [model.embed_texts(row, torch.ones_like(row), torch.tensor([0])) for row in rows]
        torch.testing.assert_close(run("texts", **texts)[0], torch.cat(one), atol=1e-5, rtol=0)
        torch.testing.assert_close(run("images", images=images)[0], model.embed_images(images), atol=1e-5, rtol=0)
        assert about["similarity"] == {"scale": pytest.approx(model.scale.item()), "bias": None}
    elif task == "embedding":
        text = "a small red circle"
        expected = vlm.load(path, device="cpu", precision="fp32").embed(text)
        ids = tokenizer_from_state(read(path)["vlm"]["tokenizer"]).encode(text)
        row = torch.tensor([[*about["reads"]["begin"], *ids, *about["reads"]["end"]]])
        given = {"tokens": row, "mask": torch.ones_like(row, dtype=torch.bool), "types": torch.zeros_like(row)}
        torch.testing.assert_close(run("model", **given)[1][0], torch.as_tensor(expected), atol=1e-5, rtol=0)
    else:
        found = run("model", **texts)[0]
        torch.testing.assert_close(found[1, :3], model(rows[1]), atol=1e-4, rtol=0)


@pytest.mark.slow
def test_the_example_captions_drawn_scenes_without_torch(tmp_path: Path) -> None:
    pytest.importorskip("onnxruntime")
    checkpoint, scenes = SAMPLE / "captioner.ckpt", tmp_path / "scenes"
    assert draw([str(scenes), "--count", "200"]) == 0
    export(str(checkpoint), str(tmp_path / "out"), form="onnx")
    photos = sorted(map(str, scenes.glob("*.png")))
    captions = vlm.load(checkpoint, device="cpu", precision="fp32").caption(photos)
    refuse = "import sys, runpy; sys.modules |= {'torch': None, 'vlm': None}; sys.argv = sys.argv[1:]; "
    run = [sys.executable, "-c", refuse + "runpy.run_path(sys.argv[0], run_name='__main__')"]
    done = subprocess.run(
        [*run, str(ROOT / "docs" / "onnx_caption.py"), str(tmp_path / "out"), *photos], capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    expected = [f"{photo}\t{one.text}" for photo, one in zip(photos, captions, strict=True)]
    assert done.stdout.splitlines() == expected and len({one.text for one in captions}) > 50


def test_what_has_no_graph_is_one_line(tmp_path: Path, monkeypatch, capsys) -> None:
    recurrent = RecurrentEncoder(vocab_size=23, max_len=16, dim=16, depth=1)
    model = TextToText(encoder=recurrent, decoder=Decoder(**SIZES, context_dim=16))
    with pytest.raises(UserError, match=r"^model\.encoder: RecurrentEncoder has no graph: it reads token by token; "):
        graphs_of(model)
    prefix = Decoder(**SIZES, prefix=Prefix(dim=16, context_dim=16))
    reader = TextEncoder(vocab_size=23, max_len=16, dim=16, depth=1, num_heads=2)
    with pytest.raises(UserError, match=r"^model\.decoder\.prefix: has no graph: .*; export --to safetensors$"):
        graphs_of(TextToText(encoder=reader, decoder=prefix))
    with pytest.raises(UserError, match="model: Linear has no graph"):
        graphs_of(torch.nn.Linear(2, 2), image_size=8)
    monkeypatch.setitem(sys.modules, "onnxscript", None)
    assert command(["export", str(tmp_path / "out"), "-c", str(FILES / "captioning.ckpt"), "--to", "onnx"]) == 2
    said = capsys.readouterr().err
    missing = "onnx" if "onnx: needs the package onnx;" in said else "onnxscript"
    line = f'error: --to onnx: needs the package {missing}; pip install "vlm-lightning[onnx]"\n'
    assert said == line and not (tmp_path / "out").exists()
