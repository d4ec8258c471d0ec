"""Models that read images inside their text: pixels, tokens, logits and texts as `transformers` has them."""

import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers as t
from hugging import photos
from image_text import MODELS, saved_image_text
from PIL import Image

import vlm
from vlm.checkpoint.file import write
from vlm.checkpoint.load import read
from vlm.cli.main import run as command
from vlm.errors import UserError
from vlm.inference.writing import word_probabilities
from vlm.models.context import PLACE
from vlm.tasks.captioning.predict import Captioner
from vlm.tasks.image_questions.predict import PromptedAnswerer

QUESTIONS = ["what is it?", "how many dogs run", "red", "is the cat\non the table?", "a"]
QUESTIONS += ["why", "where?", "the big one"]


@pytest.fixture
def folder(tmp_path: Path) -> str:
    torch.manual_seed(5)
    return str(tmp_path / "theirs")


def prompt_of(processor: Any, question: str) -> str:
    """The prompt of a question, by the chat template of a processor that has one."""
    if processor.chat_template is None:
        return f"<image>answer en {question}"
    content = [{"type": "image"}, {"type": "text", "text": question}]
    return processor.apply_chat_template([{"role": "user", "content": content}], add_generation_prompt=True)


def inputs_of(model: Any, processor: Any, path: str, question: str) -> dict[str, Any]:
    """What their model reads of an image and a question."""
    found = processor(text=prompt_of(processor, question), images=Image.open(path).convert("RGB"), return_tensors="pt")
    kept = ("input_ids", "attention_mask", "pixel_values", "pixel_attention_mask")
    kept += ("token_type_ids",) if isinstance(model, t.PaliGemmaForConditionalGeneration) else ()
    return {name: found[name] for name in kept if name in found}


@torch.no_grad()
@pytest.mark.parametrize("old", [False, True], ids=["today", "published"])
@pytest.mark.parametrize("name", MODELS)
def test_pixels_tokens_and_logits_are_theirs(folder: str, tmp_path: Path, name: str, old: bool) -> None:
    model, processor = saved_image_text(folder, name, old=old)
    ours = PromptedAnswerer(folder)
    assert ours.form is not None and ours.form.chat is not None
    for path, question in zip(photos(tmp_path / "photos", 3), QUESTIONS[1:], strict=False):
        inputs = inputs_of(model, processor, path, question)
        options = ours.options(question=question)
        (source,) = ours.sources([path], options)
        (mine,) = ours.prepare(source, options)
        theirs = inputs["input_ids"][0].tolist()
        assert mine.tokens == [PLACE if id == processor.image_token_id else id for id in theirs]
        pixels = inputs["pixel_values"].flatten(0, -4)
        assert (len(pixels) > 1) == name.endswith("tiles")
        made = ours.preprocess.normalize(mine.pixels)
        exact = not name.startswith(("llava", "pali"))  # the other processors resize by torch
        atol = 1e-6 if exact else 1.01 / 255 / min(ours.preprocess.std)
        torch.testing.assert_close(made, pixels, rtol=0, atol=atol)
        text = torch.tensor([[theirs[-1], 5, 7, 9]])
        found = ours.model.head(ours.model.decoder(text, None, ours.encode([mine])))
        longer = torch.tensor([[*theirs, 5, 7, 9]])
        more = inputs | {"input_ids": longer, "attention_mask": torch.ones_like(longer)}
        if "token_type_ids" in inputs:
            more["token_type_ids"] = torch.tensor([[0] * len(theirs) + [1] * 3])
        truth = model(**more | {"pixel_values": made.view_as(inputs["pixel_values"])}).logits[:, -4:]
        assert truth.std() > 0.3
        torch.testing.assert_close(found, truth, rtol=0, atol=1e-4)


@pytest.mark.slow
@torch.no_grad()
@pytest.mark.parametrize("name", MODELS)
def test_texts_are_theirs(folder: str, tmp_path: Path, name: str) -> None:
    """Greedy and by four beams, of 8 images with a question each, in one batch."""
    model, processor = saved_image_text(folder, name)
    ours, paths = PromptedAnswerer(folder), photos(tmp_path / "photos")
    differ = 0
    for beam in (1, 4):
        options = [ours.options(question=question, beam=beam, max_tokens=8) for question in QUESTIONS]
        sources = [ours.sources([path], one)[0] for path, one in zip(paths, options, strict=True)]
        prepared = [ours.prepare(source, one) for source, one in zip(sources, options, strict=True)]
        found = dict(ours.results([prepared], options[0]))
        for place, (path, question) in enumerate(zip(paths, QUESTIONS, strict=True)):
            inputs = inputs_of(model, processor, path, question)
            made = ours.preprocess.normalize(prepared[place][0].pixels)
            inputs["pixel_values"] = made.view_as(inputs["pixel_values"])
            searching = {"num_beams": beam, "num_return_sequences": min(beam, 2), "do_sample": False}
            told = {"return_dict_in_generate": True, "output_scores": True}
            out = model.generate(**inputs, max_new_tokens=8, **searching, **told)
            row = out.sequences[0, inputs["input_ids"].shape[1] :].tolist()
            row = [id for id in row if id not in (processor.tokenizer.eos_token_id, processor.tokenizer.pad_token_id)]
            if found[place][0][0].tokens != row:
                differ += 1
                assert margin(out, beam) <= 1e-3, (place, beam)
    assert differ <= 1


def margin(out: Any, beam: int) -> float:
    """How far the two best texts, or the two likeliest tokens of a step, are apart at the closest."""
    if beam > 1:
        return float(out.sequences_scores[0] - out.sequences_scores[1])
    return min(float(-scores.topk(2).values.diff()) for scores in out.scores)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["llava_clip", "smolvlm", "paligemma"])
def test_commands_and_python_use_a_folder(folder: str, tmp_path: Path, name: str, capsys: Any) -> None:
    saved_image_text(folder, name)
    paths = photos(tmp_path / "photos", 2)
    # In bfloat16, rounding depends on the batch, and texts of random weights on rounding.
    words = [*paths, "-c", folder, "--max-tokens", "4", "--format", "jsonl", "--precision", "fp32"]
    assert command(["caption", *words]) == 0
    captions = [json.loads(line)["caption"] for line in capsys.readouterr().out.splitlines()]
    assert command(["answer", *words, "--question", "what?", "--question", "why?", "--beam", "2"]) == 0
    answers = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert [(one["image"], one["question"]) for one in answers] == [(p, q) for p in paths for q in ("what?", "why?")]
    assert command(["answer", *words, "--question", "what?", "--results", "2", "--beam", "2"]) == 0
    said = capsys.readouterr()
    ranked = [json.loads(line) for line in said.out.splitlines()]
    assert [one["rank"] for one in ranked] == [1, 2, 1, 2] and "fewer texts" not in said.err
    model = vlm.load(folder, device="cpu", precision="fp32")
    assert model.caption(paths, max_tokens=4)[0].text == captions[0]
    both = model.answer(paths[0], question=["what?", "why?"], beam=2, max_tokens=4)
    assert [one.text for one in both] == [one["answer"] for one in answers[:2]]
    # A prompt in full is the form written out.
    whole = Captioner(folder)
    form = whole.form
    assert form is not None and form.format_example() is not None
    assert model.caption(paths[0], prompt=form.format_example().replace("{}", "red"), max_tokens=4).text == (
        model.caption(paths[0], prompt="red", max_tokens=4).text
    )
    assert model.answer(paths[0], question="red", prompt="{}", max_tokens=4).text == (
        model.caption(paths[0], prompt="red", max_tokens=4).text
    )


@pytest.mark.slow
def test_a_chat_template_that_refuses_is_reported_and_a_whole_prompt_replaces_it(
    folder: str, tmp_path: Path, capsys: Any
) -> None:
    saved_image_text(folder, "llava_siglip")
    template = Path(folder, "chat_template.jinja")
    known = template.read_text()
    template.write_text(known + "{{ 'Be brief. ' }}{{ raise_exception('no images') }}")
    (path,) = photos(tmp_path / "photos", 1)
    words = ["answer", path, "--question", "what?", "-c", folder, "--max-tokens", "3", "--format", "jsonl"]
    assert command(words) == 2
    said = capsys.readouterr().err
    assert "error: the chat template refuses the conversation: no images" in said
    whole = "<|im_start|>user <image>\n{}<|im_end|><|im_start|>assistant\n"
    assert command([*words, "--prompt", whole]) == 0
    given = capsys.readouterr().out
    template.write_text(known)
    assert command(words) == 0
    assert capsys.readouterr().out == given


ASKED = ["answer", "PHOTO", "-c", "FOLDER", "--question"]


@pytest.mark.parametrize(
    ("name", "words", "said"),
    [
        ("llava_siglip", [*ASKED, "a", "--prompt", "say {"], "--prompt must contain {} as a placeholder for"),
        ("llava_siglip", [*ASKED, "a", "--trace", "tree.json", "--beam", "2"], "--trace: is for captions"),
        ("llava_siglip", [*ASKED, "a", "--prompt", "{} <image> <image>"], "has 2 <image>; give one with <image> once"),
        (
            "llava_siglip",
            [*ASKED, "what is <image> here?"],
            "contains the special token <image>; remove it",
        ),
        ("llava_siglip", [*ASKED, "word " * 2000], "it has no room in the model's 2048; shorten it"),
        (
            "smolvlm",
            ["evaluate", "task=tagging", "data=shapes", "-c", "FOLDER"],
            "choose captioning or conversations or image_questions",
        ),
        ("smolvlm", ["caption", "PHOTO", "-c", "FOLDER", "--attention", "maps"], "that read images inside a prompt"),
        (
            "smolvlm",
            ["train", "model=pretrained", "model.path=FOLDER", "task=classification"],
            "cannot be trained for task=classification; choose task=captioning or task=conversations",
        ),
    ],
)
def test_what_a_folder_does_not_do_is_said_in_a_line(
    folder: str, tmp_path: Path, name: str, words: list[str], said: str, capsys: Any, monkeypatch: Any
) -> None:
    monkeypatch.chdir(tmp_path)
    saved_image_text(folder, name)
    (path,) = photos(tmp_path / "photos", 1)
    assert command([word.replace("PHOTO", path).replace("FOLDER", folder) for word in words]) == 2
    assert said in capsys.readouterr().err


def test_the_page_and_the_words_of_a_text_begin_where_its_prompt_ends(folder: str, tmp_path: Path) -> None:
    saved_image_text(folder, "paligemma")
    ours, (path,) = Captioner(folder), photos(tmp_path / "photos", 1)
    options = ours.options(max_tokens=6, min_tokens=6)
    prompted = ours.prepare(path, options)
    ((_, (text,)),) = ours.results([[prompted]], options)
    probabilities = [value for _, value in word_probabilities(ours, ours.encode([prompted]), text.tokens)]
    assert len(text.tokens) == 6
    assert math.prod(probabilities) == pytest.approx(math.exp(text.logprob), rel=1e-3)


@pytest.mark.parametrize("change", [{"states": 2**40}, {"chat": 7}, {"tile": None}, {"more": 1}], ids=str)
def test_a_damaged_form_of_a_checkpoint_is_refused(folder: str, tmp_path: Path, change: dict[str, Any]) -> None:
    saved_image_text(folder, "smolvlm")
    loaded = read(folder)
    loaded["vlm"]["form"] |= change
    write(tmp_path / "changed.ckpt", loaded)
    with pytest.raises(UserError, match=r"changed\.ckpt") as caught:
        Captioner(str(tmp_path / "changed.ckpt"))
    assert "\n" not in str(caught.value)


def test_a_captioner_of_images_alone_takes_no_prompt(capsys: Any) -> None:
    from tiny_checkpoints import FILES, IMAGES

    checkpoint = str(FILES / "captioning.ckpt")
    assert command(["caption", str(IMAGES[0]), "-c", checkpoint, "--prompt", "say"]) == 2
    assert "--prompt: this model reads only images" in capsys.readouterr().err
    assert command(["answer", str(IMAGES[0]), "-c", checkpoint, "--question", "what?"]) == 2
    assert "writes captions and cannot answer questions; use `vlm caption`" in capsys.readouterr().err
