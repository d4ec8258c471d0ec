"""Models that read images inside their prompts, exported: transformers computes the same as before and as we do."""

import math
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers as t
from chats import TEMPLATES, digit_pairs
from hugging import photos, save_parts, wide
from image_text import saved_image_text
from PIL import Image
from transformers.models.idefics3.modeling_idefics3 import Idefics3VisionEmbeddings

from vlm.checkpoint.file import write
from vlm.checkpoint.hugging_face import describe_folder
from vlm.checkpoint.load import load_model, read
from vlm.checkpoint.rebuild import rebuild
from vlm.cli.main import run as command
from vlm.data.images.image import Preprocess
from vlm.data.text.chat_template import ChatTemplate
from vlm.data.text.conversation import PLAIN, Turn
from vlm.data.text.prompt_form import PromptForm
from vlm.data.text.tokenizer import tokenizer_from_state
from vlm.models.context import PLACE, interleave_states
from vlm.models.pretrained.architecture import make_spec
from vlm.models.pretrained.architectures.vision_language import spread_bucketed_positions
from vlm.models.pretrained.load import load_hugging_face, open_folder
from vlm.models.pretrained.place import join_pair

SPECIAL = ["<pad>", "<bos>", "<eos>"]
NAMES = {"pad_token": "<pad>", "bos_token": "<bos>", "eos_token": "<eos>"}
QUESTIONS = [f"{word} {number}?" for word in ("what", "where", "how many dogs", "red") for number in range(4)]
CLASS_NAMES = ("llava_clip", "llava_full", "llava_siglip", "idefics3", "smolvlm", "smolvlm_tiles", "paligemma")


def their_inputs(processor: Any, path: str, question: str) -> Any:
    text = f"<image>answer en {question}"
    if processor.chat_template is not None:
        content = [{"type": "image"}, {"type": "text", "text": question}]
        text = processor.apply_chat_template([{"role": "user", "content": content}], add_generation_prompt=True)
    return processor(text=text, images=[Image.open(path).convert("RGB")], return_tensors="pt")


def load(folder: Path) -> tuple[Any, Any]:
    model, report = t.AutoModelForImageTextToText.from_pretrained(folder, output_loading_info=True)
    assert not any(report[kind] for kind in ("missing_keys", "unexpected_keys", "mismatched_keys")), report
    return model.eval(), t.AutoProcessor.from_pretrained(folder)


@pytest.mark.sample(plain=2, slow=7)
@torch.no_grad()
@pytest.mark.parametrize("name", CLASS_NAMES)
def test_a_folder_is_equal_after_import_and_export(tmp_path: Path, name: str) -> None:
    """Inputs, logits and greedy texts of 16 prompts."""
    torch.manual_seed(5)
    original, their_processor = saved_image_text(tmp_path / "theirs", name)
    assert command(["export", str(tmp_path / "ours"), "-c", str(tmp_path / "theirs"), "--to", "huggingface"]) == 0
    model, processor = load(tmp_path / "ours")
    their_processor = t.AutoProcessor.from_pretrained(tmp_path / "theirs")
    assert type(model) is type(original) and type(processor) is type(their_processor)
    assert processor.chat_template == their_processor.chat_template
    paths = photos(tmp_path / "photos")
    texts = set()
    for place, question in enumerate(QUESTIONS):
        path = paths[place % len(paths)]
        given, expected = (their_inputs(one, path, question) for one in (processor, their_processor))
        assert given.keys() == expected.keys()
        for key in expected:
            torch.testing.assert_close(given[key], expected[key], rtol=0, atol=1e-6)
        torch.testing.assert_close(model(**given).logits, original(**expected).logits, rtol=1e-4, atol=1e-4)
        rows = [one.generate(**given, do_sample=False, max_new_tokens=6)[0].tolist() for one in (model, original)]
        assert rows[0] == rows[1]
        texts.add(tuple(rows[0][given["input_ids"].shape[1] :]))
    assert len(texts) > 1


SIDE = 32


def joined_parts(folder: Path, vision: str, text: str) -> tuple[Any, Any, Any]:
    """Specifications of the encoder and decoder of two random folders, with their weights, and the tokenizer."""
    sizes = {"hidden_size": 24, "num_hidden_layers": 2, "num_attention_heads": 3, "intermediate_size": 96}
    sizes |= {"image_size": SIDE, "patch_size": 8}
    kinds = {
        "vit": lambda: t.ViTModel(t.ViTConfig(**sizes), add_pooling_layer=False),
        "siglip": lambda: t.SiglipVisionModel(t.SiglipVisionConfig(**sizes)),
        "clip": lambda: t.CLIPVisionModel(t.CLIPVisionConfig(**sizes)),
    }
    tokenizer = t.PreTrainedTokenizerFast(
        tokenizer_object=digit_pairs([*SPECIAL, "<|im_start|>", "<|im_end|>"]), **NAMES
    )
    decoder = {"hidden_size": 24, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2}
    decoder |= {"intermediate_size": 40, "max_position_embeddings": 256, "vocab_size": len(tokenizer)}
    decoder |= {"tie_word_embeddings": text != "Llama", "bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0}
    config = getattr(t, f"{text}Config")
    kind = getattr(t, f"{text}ForCausalLM")
    save_parts(
        folder / "vision", (wide(kinds[vision](), std=0.3), t.SiglipImageProcessor(size={"height": 32, "width": 32}))
    )
    save_parts(folder / "text", (wide(kind(config(**decoder)), std=0.3, norms="RMSNorm"), tokenizer))
    return describe_folder(open_folder(folder / "vision")), describe_folder(open_folder(folder / "text")), tokenizer


TIMM = ("test_vit", "test_resnet")


def joined_checkpoint(
    folder: Path, vision: str, text: str, projector: dict[str, Any], task: str, **change: Any
) -> Path:
    """A random model of an encoder, a projector and a decoder, as `model=vision_language` trains it.

    With task="template", its prompts have the form of the decoder's chat template.
    """
    # A backbone of timm has random weights, and the preprocessing of the others.
    kind = "vit" if vision in TIMM else vision
    (images, image_about), (texts, text_about), _ = joined_parts(folder, kind, text)
    backbone, decoder = images.parts["encoder"], texts.parts["decoder"]
    width = 24
    if vision in TIMM:
        backbone = make_spec("TimmEncoder", name=vision, dim=None, image_size=SIDE)
        width = rebuild(backbone).dim
    if vision == "clip":
        backbone["args"]["final_norm"] = False
    backbone["args"] |= change
    drop = int(vision in TIMM or bool(backbone["args"].get("class_token")))
    decoder["args"]["prefix"] = make_spec("Prefix", dim=24, context_dim=24, counted=True, causal=True)
    args = {"context_dim": width, "dim": 24} | {name: value for name, value in projector.items() if name != "name"}
    encoder = make_spec("ProjectedEncoder", backbone=backbone, projector=make_spec(projector["name"], **args), dim=24)
    encoder["args"]["drop"] = drop
    spec = make_spec("VisionLanguageModel", encoder=encoder, decoder=decoder)
    model = rebuild(spec)
    for parameter in model.encoder.projector.parameters():
        torch.nn.init.normal_(parameter, std=0.3)
    if vision in TIMM:
        wide(model.encoder.backbone.requires_grad_(False), std=0.2)
    else:
        load_hugging_face(model.encoder.backbone, open_folder(folder / "vision"))
    load_hugging_face(model.decoder, open_folder(folder / "text"))
    about: dict[str, Any] = {
        "task": task,
        "model": spec,
        "scores": {},
        "tokenizer": text_about["tokenizer"],
        "preprocess": image_about["preprocess"],
        "max_tokens": 6,
    }
    states = model.encoder(torch.zeros(1, 3, SIDE, SIDE)).states.shape[1]
    if task == "conversations":
        about["form"] = PromptForm(chat=PLAIN, states=states, starts=False).state()
    elif task == "template":
        template = ChatTemplate(text=TEMPLATES["chatml"], images="text")
        about |= {"task": "captioning", "form": PromptForm(chat=template, states=states, starts=False).state()}
    state = {f"model.{name}": tensor for name, tensor in model.state_dict().items()}
    write(folder / "joined.ckpt", {"format": 2, "vlm": about, "state_dict": state, "global_step": 0, "epoch": -1})
    return folder / "joined.ckpt"


MLP = {"name": "MLPProjector", "activation": "gelu_tanh"}
SHUFFLED = {"name": "LinearProjector", "shuffle": 2, "bias": False}
JOINED = [
    ("vit", "Llama", MLP, "conversations"),
    ("siglip", "Qwen2", MLP, "image_questions"),
    ("clip", "Llama", MLP, "captioning"),
    ("siglip", "Llama", SHUFFLED, "conversations"),
    ("vit", "Llama", MLP, "template"),
    ("siglip", "Llama", SHUFFLED, "template"),
    ("test_vit", "Llama", MLP, "captioning"),
    ("siglip", "Qwen3", MLP, "conversations"),
    ("vit", "Gemma", MLP, "image_questions"),
]


@pytest.mark.sample(plain=2, slow=6)
@torch.no_grad()
@pytest.mark.parametrize(("vision", "text", "projector", "task"), JOINED)
def test_a_joined_model_computes_the_same_there(
    tmp_path: Path, vision: str, text: str, projector: dict[str, Any], task: str
) -> None:
    """Tokens, logits and greedy texts of 16 prompts; and the folder is imported again."""
    torch.manual_seed(3)
    path = joined_checkpoint(tmp_path, vision, text, projector, task)
    assert command(["export", str(tmp_path / "out"), "-c", str(path), "--to", "huggingface"]) == 0
    model, processor = load(tmp_path / "out")
    kind = t.LlavaForConditionalGeneration if projector is MLP else t.Idefics3ForConditionalGeneration
    assert type(model) is kind
    loaded = read(path)
    ours, tokenizer = load_model(loaded), tokenizer_from_state(loaded["vlm"]["tokenizer"])
    again = load_model(read(tmp_path / "out"))
    paths = photos(tmp_path / "photos")
    texts = set()
    for place, question in enumerate(QUESTIONS):
        photo = Image.open(paths[place % len(paths)]).convert("RGB")
        content = [{"type": "image"}, {"type": "text", "text": question}]
        prompt = processor.apply_chat_template([{"role": "user", "content": content}], add_generation_prompt=True)
        given = processor(text=prompt, images=[photo], return_tensors="pt")
        preprocess = Preprocess.from_state(loaded["vlm"]["preprocess"])
        pixels = given["pixel_values"].flatten(0, -4)
        own = preprocess.normalize(preprocess(photo)[None])
        torch.testing.assert_close(pixels, own, rtol=0, atol=2.1 / 255 / min(preprocess.std))
        states = ours.encode(pixels).states
        if task in ("conversations", "template"):
            form = PromptForm.of(loaded["vlm"]["form"])
            tokens = form.conversation(tokenizer, [Turn("user", question, (0,))]).tokens
        else:
            asked = [] if task == "captioning" else tokenizer.encode(question)
            tokens = [*[PLACE] * states.shape[1], tokenizer.bos_id, *asked]
        ids = given["input_ids"][0].tolist()
        assert [PLACE if id == model.config.image_token_id else id for id in ids] == tokens
        context = interleave_states([tokens], states[0])
        last = torch.tensor([tokens[-1:]])
        expected = ours.head(ours.decoder(last, None, context))[0, -1]
        found = model(**given).logits[0, -1]
        torch.testing.assert_close(found[: len(expected)], expected, rtol=1e-4, atol=1e-4)
        decoded = model.generate(**given, do_sample=False)[0, len(ids) :].tolist()
        assert decoded == greedy(ours, context, tokens[-1], tokenizer.eos_id)
        texts.add(tuple(decoded))
        torch.testing.assert_close(again.encode(pixels).states, states, rtol=1e-4, atol=1e-5)
    assert len(texts) > 1


@pytest.mark.parametrize("name", ["llava_clip", "llava_siglip", "smolvlm"])
def test_the_template_of_a_checkpoint_writes_the_form_of_its_folder(tmp_path: Path, name: str) -> None:
    torch.manual_seed(5)
    _, processor = saved_image_text(tmp_path / "theirs", name)
    write(tmp_path / "own.ckpt", read(tmp_path / "theirs"))
    assert command(["export", str(tmp_path / "ours"), "-c", str(tmp_path / "own.ckpt"), "--to", "huggingface"]) == 0
    ours = t.AutoProcessor.from_pretrained(tmp_path / "ours")
    words = {"type": "text", "text": "what is 'it'?"}
    first = {"role": "user", "content": [{"type": "image"}, words]}
    turns = [first, {"role": "assistant", "content": [words]}, {"role": "user", "content": [words]}]
    for count in (1, 3):
        texts = [one.apply_chat_template(turns[:count], add_generation_prompt=True) for one in (ours, processor)]
        assert texts[0] == texts[1]


@pytest.mark.slow
@torch.no_grad()
def test_a_model_tuned_by_adapters_goes_out_merged_in_the_class_of_its_folder(tmp_path: Path) -> None:
    torch.manual_seed(5)
    saved_image_text(tmp_path / "theirs", "smolvlm")
    words = ["train", "model=pretrained", f"model.path={tmp_path / 'theirs'}", "task=captioning", "data=shapes"]
    words += ["data.source.train_scenes=16", "data.source.val_scenes=4", "data.source.test_scenes=4", "test=false"]
    words += ["data.batch_size=4", "data.num_workers=0", "trainer=cpu", "trainer.max_steps=2", "optim.lr=0.05"]
    words += ["callbacks.progress=null", "task.val_captions=2", "task.max_tokens=4", "model/adapt=lora"]
    with torch.enable_grad():
        assert command([*words, f"runs={tmp_path / 'runs'}"]) == 0
    (run,) = (tmp_path / "runs").glob("*/*")
    assert command(["export", str(tmp_path / "out"), "-c", str(run), "--to", "huggingface"]) == 0
    model, processor = load(tmp_path / "out")
    assert isinstance(model, t.SmolVLMForConditionalGeneration)
    given = their_inputs(processor, photos(tmp_path / "photos", 1)[0], "what is it?")
    ours = load_model(read(run))
    tokens = [PLACE if id == model.config.image_token_id else id for id in given["input_ids"][0].tolist()]
    context = interleave_states([tokens], ours.encode(given["pixel_values"].flatten(0, -4)).states.flatten(0, 1))
    expected = ours.head(ours.decoder(torch.tensor([tokens[-1:]]), None, context))[0, -1]
    torch.testing.assert_close(model(**given).logits[0, -1], expected, rtol=1e-4, atol=1e-4)
    before = load_model(read(tmp_path / "theirs"))
    assert not torch.equal(before.decoder.blocks[0].attn.qkv.weight, ours.decoder.blocks[0].attn.qkv.weight)


@pytest.mark.parametrize(
    ("vision", "projector", "change", "words"),
    [
        ("clip", MLP, {"final_norm": True}, "model.encoder.backbone.final_norm: is true"),
        ("siglip", SHUFFLED | {"bias": True}, {}, "model.projector.bias is true, not false"),
        ("vit", SHUFFLED, {}, "model.encoder.drop is 1, not 0"),
        ("test_resnet", MLP, {}, "model.encoder.backbone: test_resnet of timm has the class ResNet"),
    ],
)
def test_what_no_class_computes_is_refused_by_its_key(
    tmp_path: Path, vision: str, projector: dict[str, Any], change: dict[str, Any], words: str, capsys: Any
) -> None:
    path = joined_checkpoint(tmp_path, vision, "Llama", projector, "captioning", **change)
    assert command(["export", str(tmp_path / "out"), "-c", str(path), "--to", "huggingface"]) == 2
    said = capsys.readouterr().err
    assert words in said and "--to safetensors" in said and not (tmp_path / "out").exists()


@torch.no_grad()
@pytest.mark.slow
def test_joined_decoders_in_gguf(tmp_path: Path, capsys: Any) -> None:
    """Qwen3 is read again as the same model; Gemma is refused, because llama.cpp also scales the states of images."""
    for text in ("Qwen3", "Gemma"):
        (folder := tmp_path / text).mkdir()
        projector = MLP | {"activation": "gelu"}
        path = joined_checkpoint(folder, "siglip", text, projector, "captioning", final_norm=False)
        assert command(["export", str(folder / "theirs"), "-c", str(path), "--to", "huggingface"]) == 0
        words = ["export", str(folder / "out"), "-c", str(folder / "theirs"), "--to", "gguf", "--outtype", "f32"]
        if text == "Gemma":
            assert command(words) == 2
            assert "model.decoder: cannot be stored in GGUF with an image encoder" in capsys.readouterr().err
            continue
        assert command(words) == 0
        pair = join_pair(*(folder / "out" / f"{part}model-F32.gguf" for part in ("", "mmproj-")))
        again, expected = read(pair)["state_dict"], read(folder / "theirs")["state_dict"]
        assert again.keys() == expected.keys()
        for name, tensor in expected.items():
            torch.testing.assert_close(again[name], tensor, rtol=0, atol=1e-6)


def greedy(model: Any, context: Any, begin: int, end: int) -> list[int]:
    """The tokens that a model writes, without a cache."""
    written = [begin]
    while len(written) <= 6 and end not in written[1:]:
        logits = model.head(model.decoder(torch.tensor([written]), None, context))
        written.append(int(logits[0, -1].argmax()))
    return written[1:]


@pytest.mark.parametrize("count", [13, 14, 26, 27, 32])
def test_positions_of_idefics3_are_those_that_it_selects(count: int) -> None:
    torch.manual_seed(0)
    for shuffle in (1, count if count == 13 else 2 if count % 2 == 0 else 3):
        positions = torch.randn(count**2, 4)
        table = spread_bucketed_positions(positions, count, shuffle)
        side = math.isqrt(len(table))
        assert side in (count, count + shuffle)
        config = {"image_size": 4 * side, "patch_size": 4, "hidden_size": 4, "num_attention_heads": 1}
        embeddings = Idefics3VisionEmbeddings(t.Idefics3VisionConfig(**config))
        embeddings.patch_embedding.weight.data.zero_()
        embeddings.patch_embedding.bias.data.zero_()
        embeddings.position_embedding.weight.data.copy_(table)
        patches = torch.ones(1, count, count, dtype=torch.bool)
        found = embeddings(torch.zeros(1, 3, 4 * count, 4 * count), patches)[0]
        assert found.equal(positions)
