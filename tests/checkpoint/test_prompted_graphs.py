"""Graphs of models that read images inside prompts: they compute what transformers and the models compute."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hugging import photos
from image_text import MODELS, saved_image_text
from onnx_chats import limit_tokens, run_script
from PIL import Image
from torch import Tensor

import vlm
from vlm.checkpoint.export import export
from vlm.checkpoint.file import write
from vlm.checkpoint.load import load_model, read
from vlm.cli.main import run as command
from vlm.data.images.image import Preprocess
from vlm.data.text.conversation import PLAIN, Turn
from vlm.data.text.prompt_form import PromptForm
from vlm.data.text.tokenizer import tokenizer_from_state
from vlm.errors import UserError
from vlm.models.context import PLACE, Prefix
from vlm.models.decoder import Decoder
from vlm.models.encoder_decoder import VisionLanguageModel
from vlm.models.graphs import Graph, graphs_of
from vlm.models.vit import ViT
from vlm.tasks.image_questions.predict import PromptedAnswerer

QUESTIONS = ["what is it?", "how many dogs run", "a", "is the cat\non the table?"]


def empty_cache(shapes: dict[str, Any], rows: int) -> dict[str, Tensor]:
    past = {name: shape for name, shape in shapes.items() if name.startswith("past")}
    return {name: torch.zeros(rows, shape[1], 0, shape[3]) for name, shape in past.items()}


def fill(vectors: Tensor, ids: Tensor, states: Tensor) -> Tensor:
    """Puts the states of images in their places."""
    vectors = vectors.clone()
    vectors[ids == PLACE] = states.flatten(0, 1)
    return vectors


@torch.no_grad()
@pytest.mark.parametrize("name", ["llava_clip", "smolvlm", "paligemma"])
def test_steps_over_prompts_are_theirs(tmp_path: Path, name: str) -> None:
    """Rows of different lengths, with one image, with two (PaliGemma reads one) and with none (not in PaliGemma)."""
    torch.manual_seed(5)
    theirs, processor = saved_image_text(tmp_path / "theirs", name)
    loaded = read(tmp_path / "theirs")
    size, form = loaded["vlm"]["preprocess"]["image_size"], PromptForm.of(loaded["vlm"]["form"])
    graphs = {graph.name: graph for graph in graphs_of(load_model(loaded), image_size=size, inside=True)}
    step: Graph = graphs["step"]
    one = [PLACE] * form.states
    rows = [[1, *one, 20, 21, 22], [1, 9, *one, 23, *one, 5, 6, 7, 8, 9], [1, 30, 31, 32]]
    rows = [[*one, 1, 20, 21], [*one, 1, 9, 8, 7, 6]] if name == "paligemma" else rows
    answer = [11, 12, 13]
    count = sum(row.count(PLACE) for row in rows) // form.states
    pixels = torch.randn(count, 3, size, size)
    (states,) = graphs["images"].function(images=pixels)
    longest = max(map(len, rows))
    ids = torch.tensor([[*[4] * (longest - len(row)), *row] for row in rows])
    (vectors,) = graphs["embed"].function(tokens=ids.clamp(min=0))
    vectors = fill(vectors, ids, states)
    state = empty_cache({port: made.shape for port, made in step.inputs.items()}, len(rows))
    past = [*state]
    state["starts"] = torch.tensor([longest - len(row) for row in rows])
    state |= {"prompts": torch.full((len(rows),), longest)} if name == "paligemma" else {}
    found = []
    for part in [vectors, *(graphs["embed"].function(tokens=torch.tensor([[id]] * len(rows)))[0] for id in answer)]:
        logits, *caches = step.function(vectors=part, **state)
        state |= dict(zip(past, caches, strict=True))
        found.append(logits)
    first = 0
    for place, row in enumerate(rows):
        last = first + row.count(PLACE) // form.states
        whole = torch.tensor([[processor.image_token_id if id == PLACE else id for id in (*row, *answer)]])
        own = pixels[first:last]
        given = {"input_ids": whole, "attention_mask": torch.ones_like(whole)}
        given |= {"pixel_values": own[None] if name == "smolvlm" else own} if len(own) else {}
        if name == "paligemma":
            given["token_type_ids"] = torch.tensor([[0] * len(row) + [1] * len(answer)])
        expected = theirs(**given).logits[0, len(row) - 1 :]
        assert expected.std() > 0.3
        torch.testing.assert_close(torch.stack([logits[place] for logits in found]), expected, atol=1e-4, rtol=1e-4)
        first = last


def open_graphs(folder: Path) -> tuple[dict[str, Any], Any]:
    """graphs.json, and a function that runs a graph of a name."""
    runtime = pytest.importorskip("onnxruntime")
    about = json.loads((folder / "graphs.json").read_text())
    sessions = {name: runtime.InferenceSession(folder / one["file"]) for name, one in about["graphs"].items()}

    def run(name: str, **inputs: Tensor) -> list[Tensor]:
        outputs = sessions[name].run(None, {key: tensor.numpy() for key, tensor in inputs.items()})
        return [torch.from_numpy(output) for output in outputs]

    return about, run


def write_greedily(about: dict[str, Any], run: Any, tokens: list[int], pixels: Tensor, count: int) -> list[int]:
    ids = torch.tensor([tokens])
    vectors = fill(run("embed", tokens=ids.clamp(min=0))[0], ids, run("images", images=pixels)[0])
    inputs = about["graphs"]["step"]["inputs"]
    state = empty_cache({name: port["shape"] for name, port in inputs.items()}, 1)
    past = [*state]
    state |= {"starts": torch.tensor([0])} | ({"prompts": torch.tensor([len(tokens)])} if "prompts" in inputs else {})
    written: list[int] = []
    while len(written) < count and not (written and written[-1] in about["writes"]["ends"]):
        logits, *caches = run("step", vectors=vectors, **state)
        state |= dict(zip(past, caches, strict=True))
        written.append(int(logits[0].argmax()))
        (vectors,) = run("embed", tokens=torch.tensor([written[-1:]]))
    return written


@pytest.mark.slow
@torch.no_grad()
@pytest.mark.parametrize("name", [name for name in MODELS if name not in ("llava_full", "llava_interleave")])
def test_onnxruntime_writes_the_same_answers(tmp_path: Path, name: str) -> None:
    """From our pixels of images of several sizes, and by the script from files."""
    pytest.importorskip("onnxscript")
    torch.manual_seed(5)
    saved_image_text(tmp_path / "theirs", name)
    out = tmp_path / "out"
    assert command(["export", str(out), "-c", str(tmp_path / "theirs"), "--to", "onnx"]) == 0
    about, run = open_graphs(out)
    ours, paths = PromptedAnswerer(str(tmp_path / "theirs")), photos(tmp_path / "photos", 4)
    loaded = vlm.load(tmp_path / "theirs", device="cpu", precision="fp32")
    seen = set()
    for path, question in zip(paths, QUESTIONS, strict=True):
        options = ours.options(question=question, max_tokens=12)
        (prompt,) = ours.prepare(ours.sources([path], options)[0], options)
        text = loaded.answer(path, question, max_tokens=12).text
        pixels = ours.preprocess.normalize(prompt.pixels)
        written = write_greedily(about, run, [*prompt.tokens], pixels, 12)
        end = next((place for place, id in enumerate(written) if id in about["writes"]["ends"]), len(written))
        assert ours.tokenizer.decode(written[:end]).strip(" ") == text.strip(" ")
        seen.add(text)
    assert len(seen) > 1
    if not name.startswith(("idefics3", "smolvlm")):  # torch resizes for the others, and pixels would differ
        for path in paths:
            size, crop = about["image"]["image_size"], about["image"]["crop"]
            Image.open(path).resize((int(size / crop),) * 2).save(path)
    limit_tokens(out, 12)
    for question in (*QUESTIONS[:2], ""):
        made = [
            loaded.answer(path, question, max_tokens=12) if question else loaded.caption(path, max_tokens=12)
            for path in paths
        ]
        assert run_script(out, question, paths) == [one.text.strip(" ") for one in made]


@pytest.mark.slow
def test_a_fine_tuned_model_writes_the_same_captions(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """LoRA on a SmolVLM; its graphs have the merged weights."""
    pytest.importorskip("onnxscript")
    torch.manual_seed(5)
    saved_image_text(tmp_path / "theirs", "smolvlm")
    paths = photos(tmp_path / "photos", 5)
    rows = [f"{Path(path).name},a red circle {place},train" for place, path in enumerate(paths)]
    rows[0] = f"{Path(paths[0]).name},a cat,val"
    table = tmp_path / "photos" / "captions.csv"
    table.write_text("\n".join(["image,caption,split", *rows]) + "\n")
    monkeypatch.chdir(tmp_path)
    words = ["train", "model=pretrained", f"model.path={tmp_path / 'theirs'}", "task=captioning", "trainer=cpu"]
    words += ["data=captions", f"data.path={table}", "data.num_workers=0", "data.batch_size=2", "test=false"]
    words += ["model/adapt=lora", "trainer.max_epochs=4", "optim.lr=0.05"]
    assert command(words) == 0
    (checkpoint,) = Path("runs").glob("*/*/checkpoints/last.ckpt")
    export(str(checkpoint), str(tmp_path / "out"), form="onnx")
    limit_tokens(tmp_path / "out", 12)
    texts = []
    for source in (checkpoint, tmp_path / "theirs"):
        loaded = vlm.load(source, device="cpu", precision="fp32")
        texts.append([loaded.caption(path, max_tokens=12, beam=1).text.strip(" ") for path in paths])
    assert run_script(tmp_path / "out", "", paths) == texts[0] != texts[1]


@pytest.mark.slow
@torch.no_grad()
@pytest.mark.parametrize("plain", [True, False], ids=["plain", "template"])
def test_a_conversation_whose_images_have_no_token(tmp_path: Path, plain: bool) -> None:
    """As `model=vision_language` has them: with tokens of begin and end around questions, or with a template."""
    pytest.importorskip("onnxscript")
    torch.manual_seed(5)
    saved_image_text(tmp_path / "theirs", "llava_siglip")
    loaded = read(tmp_path / "theirs")
    theirs = PromptForm.of(loaded["vlm"]["form"])
    form = PromptForm(chat=PLAIN if plain else theirs.chat, states=theirs.states, starts=False)
    about = {**loaded["vlm"], "form": form.state(), "task": "conversations"}
    write(tmp_path / "own.ckpt", {**loaded, "vlm": about})
    assert command(["export", str(tmp_path / "out"), "-c", str(tmp_path / "own.ckpt"), "--to", "onnx"]) == 0
    limit_tokens(tmp_path / "out", 12)
    model, tokenizer = load_model(read(tmp_path / "own.ckpt")), tokenizer_from_state(about["tokenizer"])
    preprocess = Preprocess.from_state(about["preprocess"])
    paths = []
    for number in range(3):
        cells = np.random.default_rng(number).integers(0, 255, (32, 32, 3), dtype=np.uint8)
        Image.fromarray(cells).save(tmp_path / f"{number}.png")
        paths.append(str(tmp_path / f"{number}.png"))
    expected = []
    ends = [tokenizer.eos_id, *form.ends(tokenizer)]
    for path in paths:
        tokens = form.conversation(tokenizer, [Turn("user", QUESTIONS[0], (0,))]).tokens
        images = preprocess.normalize(preprocess(Image.open(path))[None])
        found = model.encode(images).states[0]
        written: list[int] = []
        while len(written) < 12 and not {*ends} & {*written}:
            ids = torch.tensor([[*tokens, *written]])
            laid = found.new_zeros(*ids.shape, found.shape[-1])
            laid[ids == PLACE] = found
            written.append(int(model.head(model.decoder(ids, states=laid))[0, -1].argmax()))
        expected.append(tokenizer.decode([id for id in written if id not in ends]).strip(" "))
    assert run_script(tmp_path / "out", QUESTIONS[0], paths) == expected and len({*expected}) > 1


def test_a_decoder_that_normalises_embeddings_has_no_graph(tmp_path: Path) -> None:
    saved_image_text(tmp_path / "theirs", "llava_siglip")
    model = load_model(read(tmp_path / "theirs"))
    model.decoder.embed_norm = torch.nn.LayerNorm(24)  # type: ignore[union-attr, assignment]
    with pytest.raises(UserError, match=r"^model\.decoder\.embed_norm: has no graph with images inside prompts; "):
        graphs_of(model, image_size=32, inside=True)


@pytest.mark.parametrize(
    ("fusion", "how"), [("cross", "by cross-attention"), ("prefix", "as states without positions")]
)
def test_conversations_that_read_images_otherwise_have_no_graph(fusion: str, how: str) -> None:
    encoder = ViT(image_size=8, patch_size=4, dim=8, depth=1, num_heads=2)
    sizes: dict[str, Any] = {"vocab_size": 9, "max_len": 16, "dim": 8, "depth": 1, "num_heads": 2}
    sizes |= {"context_dim": 8} if fusion == "cross" else {"prefix": Prefix(dim=8, context_dim=8)}
    model = VisionLanguageModel(encoder=encoder, decoder=Decoder(**sizes))
    with pytest.raises(UserError, match=f"conversations that read images {how} have no graph"):
        graphs_of(model, image_size=8, inside=True)
