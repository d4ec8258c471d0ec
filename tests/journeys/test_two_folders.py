"""An encoder and a decoder of two folders, joined by a fresh projector: trained in stages, resumed, used, exported."""

import json
import re
import signal

import pytest
import timm
import torch
from chats import saved_chat
from dual import saved_dual
from gguf_files import decoder, save_gguf
from hugging import ENCODERS, save_parts, saved_gpt2
from journey import best, interrupt_at, only_run, results
from timm.models import save_for_hf
from tiny_checkpoints import IMAGES

import vlm as vlm_api
from vlm.checkpoint.file import read_file
from vlm.checkpoint.load import load_model, read
from vlm.cli.main import run as vlm
from vlm.data.text.conversation import Turn
from vlm.data.text.prompt_form import PromptForm
from vlm.data.text.tokenizer import tokenizer_from_state
from vlm.models.context import PLACE
from vlm.training.run.fit import main

SCENES = ["data.source.image_size=32", "data.source.train_scenes=24", "data.source.val_scenes=4"]
SCENES += ["data.source.test_scenes=4", "data.batch_size=4", "data.eval_batch_size=4", "data.num_workers=0"]
SHORT = ["trainer=cpu", "callbacks.progress=null", "callbacks.checkpoints.every_n_steps=1", "trainer.max_steps=4"]
SHORT += ["task.max_tokens=6", "task.val_captions=2", "optim.lr=0.01"]
JOIN = ["model=vision_language", "model.encoder.path=ENCODER", "model.decoder.path=DECODER"]
FROZEN = "task.freeze=[encoder.backbone,decoder]"


@pytest.fixture(scope="module")
def parts(tmp_path_factory):
    """Folders of small random parts, by name."""
    place = tmp_path_factory.mktemp("parts")
    torch.manual_seed(0)
    for name in ("clip_vision", "siglip"):
        save_parts(place / name, ENCODERS[name]())
    save_for_hf(timm.create_model("resnet10t"), place / "timm", safe_serialization=True)
    saved_dual("clip", place / "clip")  # with a tokenizer of its own
    saved_gpt2(place / "gpt2")
    save_gguf(place / "small.gguf", *decoder("tied"), kind="Q8_0")
    model, tokenizer = decoder("llama")
    model.save_pretrained(place / "llama")
    tokenizer.save_pretrained(place / "llama")
    return place


def join_arguments(parts, encoder, decoder, *overrides):
    """The arguments of a training."""
    own = [text.replace("ENCODER", str(parts / encoder)).replace("DECODER", str(parts / decoder)) for text in JOIN]
    return [*own, *SCENES, *SHORT, *overrides]


def train_run(folder, arguments):
    assert main([*arguments, f"runs={folder}"]) == 0
    return only_run(folder)


@pytest.mark.sample(slow=2)
@pytest.mark.parametrize(
    ("encoder", "decoder", "options", "states"),
    [
        ("clip", "small.gguf", [], 9),
        pytest.param("siglip", "llama", ["model.projector.shuffle=3"], 1, marks=pytest.mark.slow),
        pytest.param("timm", "llama", ["model/projector=mlp", "data.image_size=64"], 4, marks=pytest.mark.slow),
    ],
)
def test_a_projector_learns_between_two_folders(tmp_path, parts, encoder, decoder, options, states):
    arguments = join_arguments(parts, encoder, decoder, FROZEN, "test=false", *options)
    run = train_run(tmp_path / "runs", arguments)
    loaded = read(run / "checkpoints" / "last.ckpt")
    for name, tensor in read(parts / decoder)["state_dict"].items():
        assert tensor.equal(loaded["state_dict"][name.replace("model.", "model.decoder.", 1)]), name
    side = loaded["vlm"]["preprocess"]["image_size"]
    assert load_model(loaded).encode(torch.zeros(1, 3, side, side)).states.shape == (1, states, 64)


@pytest.mark.slow
def test_stages_resume_to_the_bit_and_their_captions_go_out(tmp_path, parts, monkeypatch, capsys):
    first = train_run(tmp_path / "first", join_arguments(parts, "clip_vision", "small.gguf", FROZEN, "test=false"))
    adapted = join_arguments(parts, "clip_vision", "small.gguf", "model/adapt=lora", f"model.init_from={first}")
    whole = train_run(tmp_path / "whole", adapted)
    with monkeypatch.context() as patch:
        interrupt_at(2, signal.SIGTERM, patch)
        assert main([*adapted, f"runs={tmp_path / 'stopped'}"]) == 143
    resumed = only_run(tmp_path / "stopped")
    assert main([f"resume={resumed}"]) == 0
    one, other = (read_file(run / "checkpoints" / "last.ckpt") for run in (whole, resumed))
    assert one["global_step"] == other["global_step"] == 4
    assert all(".lora_" in name for name in one["state_dict"])
    assert all(tensor.equal(other["state_dict"][name]) for name, tensor in one["state_dict"].items())

    own = best(resumed)
    assert vlm(["evaluate", "-c", own, "--out", str(tmp_path / "scores")]) == 0
    assert results(tmp_path / "scores")["test/loss"] > 0
    assert vlm(["export", str(tmp_path / "out"), "-c", own, "--to", "safetensors"]) == 0
    capsys.readouterr()
    written = []
    for place in (own, str(tmp_path / "out")):
        assert vlm(["caption", *map(str, IMAGES[:2]), "-c", place, "--format", "jsonl", "--precision", "fp32"]) == 0
        written.append([json.loads(line)["caption"] for line in capsys.readouterr().out.splitlines()])
    assert written[0] == written[1]
    assert len(written[0]) == 2


@pytest.mark.slow
def test_conversations_train_the_joined_model_that_answers_and_chats(tmp_path, parts):
    own = ["task=conversations", "data.max_len=96", "test=false", "task.max_tokens=6"]
    arguments = [text for text in join_arguments(parts, "siglip", "llama", *own) if "val_captions" not in text]
    run = train_run(tmp_path, arguments)
    model = vlm_api.load(run, device="cpu", precision="fp32")
    asked = [
        "what color is the small cross?",
        "how many circles are there?",
        "is there a blue cross?",
        "what is below it?",
    ]
    texts = sorted(asked, key=lambda text: not model.answer(IMAGES[0], question=text).text)  # those with answers first
    answered = [model.answer(IMAGES[0], question=text).text for text in texts[:2]]
    session = model.chat(IMAGES[0], sample=False)
    said = "".join(session.stream(texts[0]))
    assert answered[0] and said.strip().startswith(answered[0])  # which is no longer than training's
    assert session.tokens()[:10].count(PLACE) == 9  # the image stands first
    before = session.tokens()
    assert "".join(session.stream(texts[1])) is not None and session.tokens()[: len(before)] == before


@pytest.mark.slow
def test_prompts_have_the_form_of_the_decoders_chat_template(tmp_path, parts, capsys):
    """In training, evaluation and chat; a second stage goes on with it, and none turns it off."""
    theirs = saved_chat(tmp_path / "chat", "chatml")
    own = ["task=conversations", "test=false", "task.max_tokens=6", f"model.decoder.path={tmp_path / 'chat'}"]
    arguments = [text for text in join_arguments(parts, "siglip", "llama", *own) if "val_captions" not in text]
    first = train_run(tmp_path / "first", arguments)
    about = read(first)["vlm"]
    form, tokenizer = PromptForm.of(about["form"]), tokenizer_from_state(about["tokenizer"])
    assert form.states == 9 and form.image_id is None
    rendered = form.conversation(tokenizer, TURNS, answering=False, generated=True)
    messages = [{"role": turn.role, "content": "<image>\n" * turn.num_images + turn.text} for turn in TURNS]
    text = theirs.apply_chat_template(messages, tokenize=False)
    before, after = (theirs.encode(part) for part in text.split("<image>"))
    assert rendered.tokens == [*before, *[PLACE] * 9, *after]
    written = [token for token, flag in zip(*rendered, strict=True) if flag]
    assert theirs.decode(written) == "a red cross<|im_end|>none<|im_end|>"

    session = vlm_api.load(first, device="cpu", precision="fp32").chat(IMAGES[0], sample=False)
    "".join(session.stream("what is it?"))
    prompt = form.conversation(tokenizer, [Turn("user", "what is it?", (0,))]).tokens
    assert session.tokens()[: len(prompt)] == prompt
    second = train_run(tmp_path / "second", [*arguments, f"model.init_from={first}"])
    assert read(second)["vlm"]["form"] == about["form"]
    assert vlm(["evaluate", "-c", best(second), "--out", str(tmp_path / "scores")]) == 0
    assert results(tmp_path / "scores")["test/loss"] > 0

    plain = train_run(tmp_path / "plain", [*arguments, "model.chat_template=none"])
    assert read(plain)["vlm"]["form"]["chat"]["plain"] is True
    capsys.readouterr()
    assert main([*arguments, "model.chat_template=chatml", f"runs={tmp_path}"]) == 2
    assert "model.chat_template=chatml: choose auto or none" in capsys.readouterr().err


TURNS = [
    Turn("user", "what is it?", (0,)),
    Turn("assistant", "a red cross"),
    Turn("user", "and a circle?"),
    Turn("assistant", "none"),
]


@pytest.mark.sample(plain=2, slow=2)
@pytest.mark.parametrize(
    ("encoder", "decoder", "options", "words"),
    [
        ("siglip", "llama", ["model.encoder.path=null"], "model.encoder.path: give either the encoder's folder, or"),
        ("llama", "llama", [], "model.encoder.path=.*: holds a LlamaForCausalLM; give a folder of an image encoder"),
        ("siglip", "siglip", [], "model.decoder.path=.*: holds a SiglipVisionModel; give a decoder of Llama's family"),
        ("siglip", "gpt2", [], "model.decoder.path=.*: holds a GPT2LMHeadModel; give a decoder of Llama's family"),
        ("siglip", "llama", ["model.decoder.path=null"], "model.decoder.path: missing; give model.decoder.path="),
        (
            "siglip",
            "llama",
            ["model.projector.shuffle=2"],
            "projector.shuffle: the 9 states of an image do not form a grid",
        ),
        (
            "siglip",
            "llama",
            ["task=tagging"],
            "does not support task=tagging; choose captioning, conversations, image_",
        ),
    ],
)
def test_parts_that_do_not_join_are_refused_in_a_line(tmp_path, parts, capfd, encoder, decoder, options, words):
    assert main(join_arguments(parts, encoder, decoder, *options, f"runs={tmp_path}")) == 2
    error = next(line for line in capfd.readouterr().err.splitlines() if line.startswith("error: "))
    assert re.search(words, error), error
