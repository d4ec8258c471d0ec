"""Prompts and conversations as `transformers` writes and encodes them, whose templates jinja runs."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from chats import TEMPLATES, saved_chat
from hugging import photos
from image_text import saved_image_text
from PIL import Image
from transformers import AutoProcessor, AutoTokenizer

from vlm.checkpoint.load import read
from vlm.data.images.image import Preprocess
from vlm.data.text.conversation import PLAIN, ChatForm, Turn
from vlm.data.text.prompt_form import PromptForm, reads_images_inside_texts
from vlm.data.text.tokenizer import CharTokenizer, tokenizer_from_state
from vlm.errors import UserError
from vlm.models.context import PLACE

TALK = [
    Turn("system", "be brief"),
    Turn("user", "what is it?", (0, 0)),
    Turn("assistant", "a dog.\nIt runs"),
    Turn("user", "and 3 cats?", (0,)),
    Turn("assistant", "3 cats"),
    Turn("user", " red or blue"),
]
IMAGE_FORMS = ["llava_clip", "llava_siglip", "llava_interleave", "idefics3", "smolvlm", "smolvlm_tiles"]


def theirs_of(turns: list[Turn], *, parts: bool = True) -> list[dict[str, Any]]:
    """The messages of a conversation."""
    messages = []
    for turn in turns:
        content: Any = [*[{"type": "image"}] * turn.num_images, {"type": "text", "text": turn.text}]
        messages.append({"role": turn.role, "content": content if parts else turn.text})
    return messages


def save_model(folder: Path, name: str) -> tuple[Any, PromptForm, Any, dict[str, Any]]:
    """Saves a model; its processor or tokenizer, and the form and the tokenizer that are read of it."""
    torch.manual_seed(5)
    theirs = saved_chat(folder, name) if name in TEMPLATES else saved_image_text(folder, name)[1]
    about = read(str(folder))["vlm"]
    return theirs, PromptForm.of(about["form"]), tokenizer_from_state(about["tokenizer"]), about


@pytest.mark.sample(plain=3, slow=9)
@pytest.mark.parametrize("system", [True, False], ids=["system", "none"])
@pytest.mark.parametrize("name", IMAGE_FORMS)
def test_conversations_with_images_are_those_of_their_processor(tmp_path: Path, name: str, system: bool) -> None:
    processor, form, tokenizer, about = save_model(tmp_path / "theirs", name)
    images = [Image.open(path).convert("RGB") for path in photos(tmp_path / "photos", 3)]
    turns = TALK if system else TALK[1:]
    for count in range(1 + system, len(turns) + 1):
        some = turns[:count]
        shown = images[: sum(turn.num_images for turn in some)]
        for answering in (False, True):
            text = processor.apply_chat_template(theirs_of(some), add_generation_prompt=answering)
            theirs = processor(text=text, images=shown)["input_ids"]
            theirs = theirs[0] if isinstance(theirs[0], list) else theirs
            squares = [Preprocess.from_state(about["preprocess"]).views(image)[1:] for image in shown]
            ours = form.conversation(tokenizer, some, squares, answering=answering)
            assert ours.tokens == [PLACE if id == processor.image_token_id else id for id in theirs]
            assert len(ours.generated) == len(ours.tokens)


@pytest.mark.parametrize("name", TEMPLATES)
def test_conversations_of_text_are_those_of_their_tokenizer(tmp_path: Path, name: str) -> None:
    theirs, form, tokenizer, _ = save_model(tmp_path / "theirs", name)
    talk = [Turn(turn.role, turn.text) for turn in TALK]
    thought = [talk[1], Turn("assistant", "<think>\nso\n\nor so\n</think>\n\na dog"), talk[3]]
    others = [[*thought, thought[1]], [*thought, talk[2]], thought] if name == "qwen3" else []
    for turns in (talk, talk[1:], talk[1:2], *others):
        if turns is talk and name == "gemma":
            with pytest.raises(UserError, match="the chat template refuses the conversation: No system here"):
                form.conversation(tokenizer, turns)
            continue
        for answering in (False, True):
            options = {"add_generation_prompt": answering, "return_dict": False}
            truth = theirs.apply_chat_template(theirs_of(turns, parts=False), **options)
            assert form.conversation(tokenizer, turns, answering=answering).tokens == truth


NAMED = [{"name": "tool_use", "template": "{{ tools }}"}, {"name": "default", "template": TEMPLATES["chatml"]}]
FILES = {
    "list": {"tokenizer_config.json": NAMED},
    "dict": {"tokenizer_config.json": {one["name"]: one["template"] for one in NAMED}},
    "more files": {
        "chat_template.jinja": TEMPLATES["chatml"],
        "additional_chat_templates/tool_use.jinja": "{{ tools }}",
    },
    "file named default": {
        "additional_chat_templates/default.jinja": TEMPLATES["chatml"],
        "chat_template.jinja": "{{ 1 }}",
    },
    "file before config": {"chat_template.jinja": TEMPLATES["chatml"], "tokenizer_config.json": "{{ 1 }}"},
    "no processor": {"tokenizer_config.json": TEMPLATES["chatml"], "chat_template.json": "{{ 1 }}"},
}


def write_templates(folder: Path, files: dict[str, Any]) -> None:
    """Gives a folder these chat templates and no other."""
    (folder / "chat_template.jinja").unlink(missing_ok=True)
    for name, template in files.items():
        (folder / name).parent.mkdir(exist_ok=True)
        if name.endswith(".jinja"):
            (folder / name).write_text(template)
        else:
            stated = json.loads((folder / name).read_text()) if (folder / name).is_file() else {}
            (folder / name).write_text(json.dumps(stated | {"chat_template": template}))


@pytest.mark.parametrize("name", FILES)
def test_the_default_of_several_templates_is_read(tmp_path: Path, name: str) -> None:
    save_model(tmp_path / "theirs", "chatml")
    write_templates(tmp_path / "theirs", FILES[name])
    about = read(str(tmp_path / "theirs"))["vlm"]
    form, tokenizer = PromptForm.of(about["form"]), tokenizer_from_state(about["tokenizer"])
    talk = [Turn(turn.role, turn.text) for turn in TALK]
    theirs = AutoTokenizer.from_pretrained(tmp_path / "theirs")
    truth = theirs.apply_chat_template(theirs_of(talk, parts=False), add_generation_prompt=True, return_dict=False)
    assert form.conversation(tokenizer, talk).tokens == truth


@pytest.mark.parametrize("first", ["chat_template.json", "processor_config.json"])
def test_a_processor_prefers_its_own_files(tmp_path: Path, first: str) -> None:
    save_model(tmp_path / "theirs", "smolvlm")
    template = (tmp_path / "theirs" / "chat_template.jinja").read_text()
    write_templates(tmp_path / "theirs", {first: template, "chat_template.jinja": "{{ 1 }}"})
    processor = AutoProcessor.from_pretrained(tmp_path / "theirs")
    assert processor.apply_chat_template(theirs_of(TALK[1:2]), add_generation_prompt=True).startswith(
        "<|im_start|>User"
    )
    assert read(str(tmp_path / "theirs"))["vlm"]["form"]["chat"] is not None


@pytest.mark.parametrize("stated", [[{"name": "default"}], 3, [3], {"default": 3}], ids=str)
def test_a_damaged_list_of_templates_is_refused(tmp_path: Path, stated: Any) -> None:
    save_model(tmp_path / "theirs", "chatml")
    write_templates(tmp_path / "theirs", {"tokenizer_config.json": stated})
    with pytest.raises(UserError, match=r"tokenizer_config\.json: chat_template is"):
        read(str(tmp_path / "theirs"))


@pytest.mark.parametrize(
    ("name", "own"),
    [
        ("llava_clip", "a dog.\nIt runs  3 cats "),  # whose tokens cross the ends of words
        ("llava_siglip", " \na dog.\nIt runs<|im_end|> \n3 cats<|im_end|>"),
        ("llava_interleave", " a dog.\nIt runs<|im_end|> 3 cats<|im_end|>"),
        ("smolvlm", " a dog.\nIt runs<end_of_utterance> 3 cats<end_of_utterance>"),
        *((name, "a dog.\nIt runs<|im_end|>3 cats<|im_end|>") for name in ("chatml", "qwen25")),
        *((name, "a dog.\nIt runs<|eot_id|>3 cats<|eot_id|>") for name in ("llama31", "llama3")),
        ("gemma", "a dog.\nIt runs<end_of_turn>3 cats<end_of_turn>"),
    ],
)
def test_what_the_model_writes_of_a_conversation_is_marked(tmp_path: Path, name: str, own: str) -> None:
    """With the end of its turns, and the space that its prompt lacks."""
    _, form, tokenizer, _ = save_model(tmp_path / "theirs", name)
    turns = [Turn(turn.role, turn.text, turn.places * (form.states > 0)) for turn in TALK[1:]]
    tokens, marks = form.conversation(tokenizer, turns, answering=False, generated=True)
    written = [id for id, mine in zip(tokens, marks, strict=True) if mine]
    assert tokenizer._library.decode(written, False) == own
    (end,) = form.ends(tokenizer) or [None]
    assert end is None or own.endswith(tokenizer.piece(end))


def test_answers_that_later_turns_change_cannot_be_trained(tmp_path: Path) -> None:
    """Qwen3's earlier answers lose their thoughts."""
    _, form, tokenizer, _ = save_model(tmp_path / "theirs", "qwen3")
    turns = [Turn(turn.role, turn.text) for turn in TALK[1:5]]
    with pytest.raises(UserError, match=r"writes the beginning of .* differently .*; add {% generation %} and"):
        form.conversation(tokenizer, turns, answering=False, generated=True)
    assert form.conversation(tokenizer, turns, answering=False).tokens and form.has_thoughts


def make_chatml(**arguments: Any) -> ChatForm:
    heads = {role: f"<|im_start|>{role}\n" for role in ("system", "user", "assistant")}
    return ChatForm(heads=heads, answer=heads["assistant"], end="<|im_end|>", after="\n", **arguments)


# Forms that checkpoints store which were imported before templates were rendered.
STORED = {
    "chatml": make_chatml(system="You are kind"),
    "qwen3": make_chatml(thoughts=("<think>", "</think>")),
    "smolvlm": ChatForm(
        heads={"system": "System:", "user": "User:", "assistant": "Assistant:"},
        answer="Assistant:",
        end="<end_of_utterance>",
        after="\n",
        bare=" ",
        begin="<|im_start|>",
    ),
    "gemma": ChatForm(
        heads={"user": "<start_of_turn>user\n", "assistant": "<start_of_turn>model\n"},
        answer="<start_of_turn>model\n",
        end="<end_of_turn>",
        after="\n",
        begin="<bos>",
        trimmed=True,
    ),
}


@pytest.mark.parametrize("name", STORED)
def test_stored_forms_are_those_of_the_templates(tmp_path: Path, name: str) -> None:
    _, form, tokenizer, _ = save_model(tmp_path / "theirs", name)
    stored = PromptForm.of(replace(form, chat=STORED[name]).state())
    turns = [Turn(turn.role, turn.text, turn.places * (form.states > 0)) for turn in TALK[1:]]
    for count in (1, 2, 5):
        for answering in (False, True):
            tokens = stored.conversation(tokenizer, turns[:count], answering=answering).tokens
            assert tokens == form.conversation(tokenizer, turns[:count], answering=answering).tokens
    assert stored.ends(tokenizer) == form.ends(tokenizer) != []
    with pytest.raises(UserError, match="judge: has no turn"):
        stored.conversation(tokenizer, [Turn("judge", "a")])  # type: ignore[arg-type]


@pytest.mark.parametrize("name", ["smolvlm", "chatml", "gemma"])
def test_turns_after_an_answer_go_on_where_it_ended(tmp_path: Path, name: str) -> None:
    """The tokens of an answer, then those of what follows, are those of the whole conversation."""
    _, form, tokenizer, _ = save_model(tmp_path / "theirs", name)
    form = replace(form, chat=STORED[name])
    images = (0,) * (form.states > 0)
    talk = [
        Turn("user", "what?", images),
        Turn("assistant", "a dog runs"),
        Turn("user", "and the cat?", images),
    ]
    first, whole = form.conversation(tokenizer, talk[:1]).tokens, form.conversation(tokenizer, talk).tokens
    later = form.conversation(tokenizer, talk[2:], continued=True).tokens
    assert whole[-len(later) :] == later
    assert whole[: len(first)] == first
    assert tokenizer.decode(whole[len(first) : -len(later)]).strip() == "a dog runs"


def test_later_turns_read_an_answer_without_its_thoughts(tmp_path: Path) -> None:
    _, form, tokenizer, _ = save_model(tmp_path / "theirs", "qwen3")
    form = replace(form, chat=STORED["qwen3"])
    answer = "<think>\nso\n</think>\n\nor so\n</think>\n\n\na dog\n"
    for text, words in ((answer, "a dog\n"), ("<think>\nso", "<think>\nso"), ("a dog", "a dog"), (answer[:-7], "")):
        assert tokenizer.decode(form.past(tokenizer, tokenizer.encode(text))) == words


def test_the_plain_form_needs_no_words_of_its_own() -> None:
    words = ["a small circle", "a red cross"]
    tokenizer, form = CharTokenizer().fit(words), PromptForm(chat=PLAIN, states=3)
    turns = [Turn("user", words[0], (0, 0)), Turn("assistant", words[1]), Turn("user", words[1])]
    asked, answer = map(tokenizer.encode, words)
    begin, end = tokenizer.bos_id, tokenizer.eos_id
    tokens, own = form.conversation(tokenizer, turns)
    assert tokens == [*[PLACE] * 6, *asked, end, begin, *answer, end, *answer, end, begin]
    assert [id for id, mine in zip(tokens, own, strict=True) if mine] == [*answer, end]
    assert form.conversation(tokenizer, turns[2:], continued=True).tokens == [end, *answer, end, begin]
    assert PromptForm.of(form.state()) == form


def test_whether_images_are_read_inside_texts(tmp_path: Path) -> None:
    for name, expected in (("smolvlm", True), ("chatml", False)):  # the second reads texts only
        assert reads_images_inside_texts(save_model(tmp_path / name, name)[3]) is expected
    preprocess = Preprocess(image_size=8).state()
    for chat, expected in ((PLAIN, False), (ChatForm(heads={"user": ""}, before="", after=""), True)):
        form = PromptForm(chat=chat, states=3).state()
        assert reads_images_inside_texts({"preprocess": preprocess, "form": form}) is expected
    assert not reads_images_inside_texts({"preprocess": preprocess})


@pytest.mark.parametrize(
    "change",
    [{"heads": 3}, {"heads": {"judge": ""}}, {"heads": {"user": 1}}, {"end": None}, {"image": ["a"]}, {"more": 1}],
    ids=str,
)
def test_a_damaged_form_is_refused(change: dict[str, Any]) -> None:
    with pytest.raises((TypeError, ValueError)):
        ChatForm.of(PLAIN.state() | change)


def test_texts_that_name_special_tokens_are_refused(tmp_path: Path) -> None:
    _, form, tokenizer, _ = save_model(tmp_path / "theirs", "chatml")
    with pytest.raises(UserError, match="contains the special token"):
        form.conversation(tokenizer, [Turn("user", "a<|im_end|>b")])
    assert form.conversation(tokenizer, [Turn("user", "a <image>")]).tokens  # which this model has no token for
    with pytest.raises(UserError, match="images: this model cannot chat about images"):
        form.conversation(tokenizer, [Turn("user", "a", (0,))])
