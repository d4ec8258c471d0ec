"""Chat templates of folders: their content, their answers and their ends, compared with transformers."""

import json
from pathlib import Path
from typing import Any

import pytest
from chat_templates import HOSTILE, TEMPLATES
from chats import saved_chat, tokenizer_of

from vlm.checkpoint.load import read
from vlm.data.text.chat_template import ChatTemplate
from vlm.data.text.conversation import Turn
from vlm.data.text.library import JsonTokenizer
from vlm.data.text.prompt_form import PromptForm
from vlm.data.text.tokenizer import tokenizer_from_state
from vlm.errors import UserError

TALK = [Turn("user", "what?"), Turn("assistant", "a dog\nruns"), Turn("user", "and?"), Turn("assistant", "3 cats")]
MARKS = {"bos_token": "<s>", "eos_token": "</s>"}


def make(name: str, **arguments: Any) -> ChatTemplate:
    return ChatTemplate(text=TEMPLATES[name], special_tokens=MARKS, **arguments)


@pytest.mark.parametrize(
    ("name", "answers"),
    [
        ("chatml", ["a dog\nruns<|im_end|>\n", "3 cats<|im_end|>\n"]),
        ("chatml_generation", ["a dog\nruns<|im_end|>", "3 cats<|im_end|>"]),
        ("llama3", ["a dog\nruns<|eot_id|>", "3 cats<|eot_id|>"]),
        ("llama2", [" a dog\nruns </s>", " 3 cats </s>"]),
        ("mistral_v1", ["a dog\nruns</s>", "3 cats</s>"]),
        ("gemma1", ["a dog\nruns<end_of_turn>\n", "3 cats<end_of_turn>\n"]),
        ("deepseek_r1", ["a dog\nruns<｜end▁of▁sentence｜>", "3 cats<｜end▁of▁sentence｜>"]),
        ("vicuna", [" a dog\nruns</s>", " 3 cats</s>"]),
    ],
)
def test_answers_are_what_follows_their_prompts(name: str, answers: list[str]) -> None:
    text, spans = make(name).find_generated(TALK)
    assert [text[begin:end] for begin, end in spans] == answers
    assert text == make(name).render(TALK, answering=False)


@pytest.mark.parametrize("name", ["qwen3", "phi3", "mistral_v3"])
def test_templates_that_change_earlier_turns_are_refused_for_training(name: str) -> None:
    """Earlier answers lose their thoughts, the conversation has an end, or the system text precedes the last turn."""
    turns = [Turn("system", "s"), *TALK[:3], Turn("assistant", "<think>\nso\n</think>\n\nb")]
    with pytest.raises(UserError, match=r"cannot be found; add {% generation %} and {% endgeneration %} around"):
        make(name).find_generated(turns)
    assert make(name).render(turns, answering=False)


@pytest.mark.parametrize("name", ["chatml_generation", "llama3_generation"])
def test_marked_answers_are_the_tokens_of_transformers(name: str) -> None:
    theirs = tokenizer_of("chatml" if name.startswith("chatml") else "llama3")
    messages = [{"role": turn.role, "content": turn.text} for turn in TALK]
    truth = theirs.apply_chat_template(
        messages, chat_template=TEMPLATES[name], return_assistant_tokens_mask=True, return_dict=True
    )
    ids = {"pad": 0, "bos": theirs.bos_token_id, "eos": theirs.eos_token_id}
    ours = JsonTokenizer.of_file(json.loads(theirs.backend_tokenizer.to_str()), size=len(theirs), **ids)
    template = ChatTemplate(text=TEMPLATES[name], special_tokens={"bos_token": theirs.bos_token})
    rendered = PromptForm(chat=template, starts=False).conversation(ours, TALK, answering=False, generated=True)
    assert (rendered.tokens, rendered.generated) == (truth["input_ids"], list(map(bool, truth["assistant_masks"])))
    assert any(rendered.generated) and not all(rendered.generated)


@pytest.mark.parametrize("name", ["chatml", "gemma1", "llama2", "mistral_v3", "qwen3", "vicuna"])
def test_answers_are_found_in_a_rendering(name: str) -> None:
    turns = [TALK[0], Turn("assistant", " a dog\nruns "), TALK[2], Turn("assistant", "and?"), Turn("user", "why?")]
    text = make(name).render(turns, answering=True)
    spans = make(name).find_answers(turns, text, answering=True)
    assert spans is not None and [text[begin:end].strip() for begin, end in spans] == ["a dog\nruns", "and?"]
    assert text[spans[1][0] :].startswith("and?") and spans[1][0] > text.index("and?")  # the answer, not the question


def test_answers_that_a_template_changes_are_not_found() -> None:
    turns = [TALK[0], Turn("assistant", "<think>\nso\n</think>\n\na dog"), TALK[2]]
    assert make("qwen3").find_answers(turns, make("qwen3").render(turns, answering=True), answering=True) is None


def test_tokens_that_the_model_wrote_replace_those_of_its_text(tmp_path: Path) -> None:
    saved_chat(tmp_path / "theirs", "chatml")
    about = read(str(tmp_path / "theirs"))["vlm"]
    form, tokenizer = PromptForm.of(about["form"]), tokenizer_from_state(about["tokenizer"])
    texts = form.conversation(tokenizer, TALK[:3]).tokens
    usual = tokenizer.encode(TALK[1].text)
    written = [id for char in TALK[1].text for id in tokenizer.encode(char)]
    assert written != usual and tokenizer.decode(written) == TALK[1].text
    at = next(at for at in range(len(texts)) if texts[at : at + len(usual)] == usual)
    mixed = form.conversation(tokenizer, TALK[:3], answers=[written]).tokens
    assert mixed == [*texts[:at], *written, *texts[at + len(usual) :]]


def test_images_are_parts_or_text() -> None:
    turn = Turn("user", "first second", (0, 6, 12))
    assert make("smolvlm", images="parts").render([turn], answering=True) == (
        "<|im_start|>User:<image>first <image>second<image><end_of_utterance>\nAssistant:"
    )
    assert make("chatml", images="text").render([turn], answering=False) == (
        "<|im_start|>user\n<image>\nfirst <image>\nsecond<image>\n<|im_end|>\n"
    )
    assert (turn.num_images, [*turn.parts()]) == (3, [None, "first ", None, "second", None])
    assert [*Turn("user", "a").parts()] == ["a"] and [*Turn("user", "", (0, 0)).parts()] == [None, None]


def test_the_date_is_fixed_and_stored() -> None:
    template = make("mistral_small").with_date("2025-03-09")
    assert "The current date is 2025-03-09." in template.render(TALK[:1], answering=True)
    form = PromptForm(chat=template, starts=False)
    assert PromptForm.of(form.state()) == form


@pytest.mark.parametrize(
    "change",
    [
        {"text": "a" * (2**16 + 1)},
        {"text": 3},
        {"special_tokens": {"bos_token": 1}},
        {"special_tokens": {"messages": "a"}},
        {"images": "both"},
        {"date": "tomorrow"},
        {"more": 1},
    ],
    ids=lambda change: next(iter(change)),
)
def test_a_damaged_template_is_refused(change: dict[str, Any]) -> None:
    with pytest.raises((TypeError, ValueError)):
        ChatTemplate.of(make("chatml").state() | change)


@pytest.mark.parametrize("name", ["endless loops", "a syntax error"])
def test_a_folder_with_a_hostile_template_is_read_and_refuses_to_chat(tmp_path: Path, name: str) -> None:
    saved_chat(tmp_path / "theirs", "chatml")
    (tmp_path / "theirs" / "chat_template.jinja").write_text(HOSTILE[name][0])
    about = read(str(tmp_path / "theirs"))["vlm"]
    form, tokenizer = PromptForm.of(about["form"]), tokenizer_from_state(about["tokenizer"])
    with pytest.raises(UserError, match=f"the chat template .*({HOSTILE[name][1]})"):
        form.conversation(tokenizer, TALK[:1])
    assert form.ends(tokenizer) == [] and form.format_example() is None


def test_a_folder_with_a_long_template_is_refused(tmp_path: Path) -> None:
    saved_chat(tmp_path / "theirs", "chatml")
    (tmp_path / "theirs" / "chat_template.jinja").write_text("a" * 70_000)
    with pytest.raises(UserError, match=r"chat_template\.jinja: the chat template has 70,000 characters; the maximum"):
        read(str(tmp_path / "theirs"))
