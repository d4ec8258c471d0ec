"""Conversations: what stays in the cache gives the texts of a fresh reading, by `transformers` too."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers as t
from chat_templates import TEMPLATES
from chats import saved_chat
from hugging import photos
from image_text import saved_image_text
from PIL import Image
from tiny_checkpoints import FILES

import vlm
from vlm.data.text.conversation import Turn
from vlm.errors import UserError
from vlm.inference.command_options import ChatOptions
from vlm.models.context import PLACE
from vlm.models.decoder import Decoder
from vlm.tasks.chat.predictor import ContextFullError, TurnWithImages
from vlm.tasks.chat.session import Chat

QUESTIONS = [f"{word} {number}?" for number in range(5) for word in ("what is", "how many", "why red", "is it the cat")]


@pytest.fixture
def folder(tmp_path: Path) -> str:
    torch.manual_seed(5)
    return str(tmp_path / "theirs")


def fresh(model: Any, ids: list[int], pixels: Any, most: int, ends: list[int]) -> list[int]:
    """What `transformers` writes after some tokens, greedily, which it reads anew."""
    row = torch.tensor([ids])
    more = {} if pixels is None else {"pixel_values": pixels}
    options: Any = {"max_new_tokens": most, "do_sample": False, "eos_token_id": ends, "pad_token_id": 0}
    out = model.generate(input_ids=row, attention_mask=torch.ones_like(row), **more, **options)
    return [id for id in out[0, len(ids) :].tolist() if id not in ends]


@pytest.mark.slow
@torch.no_grad()
def test_twenty_turns_with_an_image_are_those_of_a_fresh_reading(folder: str, tmp_path: Path) -> None:
    model, processor = saved_image_text(folder, "smolvlm")
    (path,) = photos(tmp_path / "photos", 1)
    chat = vlm.load(folder, device="cpu", precision="fp32").chat(path, sample=False, max_tokens=8)
    theirs = processor(text="<image>", images=Image.open(path).convert("RGB"), return_tensors="pt")["pixel_values"]
    read = steps(chat)
    for question in QUESTIONS:
        answer = chat.say(question)
        asked = chat.tokens()[: chat.reply.read]
        ids = [processor.image_token_id if id == PLACE else id for id in asked]
        truth = fresh(model, ids, theirs, 8, chat.predictor.ends)
        assert chat.reply.tokens == truth and chat.tokens() == [*asked, *truth]
        assert answer == chat.predictor.tokenizer.decode(truth).lstrip()
    assert len(QUESTIONS) == 20
    assert max(read[1:]) < 60 and read[0] > 4  # of each turn, what is new; the image is read once
    assert chat.turns[0] == Turn("user", QUESTIONS[0], (0,)) and len(chat.turns) == 40


RULES: dict[str, dict[str, Any]] = {
    "repetition_penalty": {"repetition_penalty": 1.5},
    "no_repeat_ngram_size": {"no_repeat_ngram_size": 2},
    "min_new_tokens": {"min_new_tokens": 12},
    "all": {"repetition_penalty": 1.2, "no_repeat_ngram_size": 3, "min_new_tokens": 5},
}


@pytest.mark.slow
@torch.no_grad()
@pytest.mark.parametrize("name", [*RULES, "bad_words_ids"])
def test_rules_of_the_folder_hold_in_conversations(folder: str, name: str) -> None:
    """As `transformers` applies them, in a conversation turn by turn and in those that a service answers together."""
    saved_chat(folder, "chatml")
    plain = vlm.load(folder, device="cpu", precision="fp32").chat(sample=False, max_tokens=20)
    free = [plain.say(question) and list(plain.reply.tokens) for question in QUESTIONS[:1]]
    stated = RULES.get(name) or {"bad_words_ids": [[token] for token in dict.fromkeys(free[0][:4])]}
    path = Path(folder) / "generation_config.json"
    known = json.loads(path.read_text())
    ends = [known["eos_token_id"], free[0][4]]  # without a minimum, the answer would be short
    stated = stated | ({"eos_token_id": ends} if "min_new_tokens" in stated else {})
    path.write_text(json.dumps({**known, **stated, "renormalize_logits": True}))
    model, theirs = vlm.load(folder, device="cpu", precision="fp32"), t.AutoModelForCausalLM.from_pretrained(folder)
    chat = model.chat(sample=False, max_tokens=20)
    truths = []
    for question in QUESTIONS[:3]:
        chat.say(question)
        truths.append(fresh(theirs, chat.tokens()[: chat.reply.read], None, 20, chat.predictor.ends))
        assert chat.reply.tokens == truths[-1]
    assert truths[0][: len(free[0])] != free[0] and len(truths[0]) >= stated.get("min_new_tokens", 0)
    said = [[TurnWithImages(turn) for turn in chat.turns[: 2 * place + 1]] for place in range(3)]
    prompts = [chat.predictor.prepare(one, ChatOptions(**vars(chat.options))) for one in said]
    options = ChatOptions(**vars(chat.options))
    replies = dict(chat.predictor.results([prompts], options))
    alone = [next(iter(chat.predictor.results([[prompt]], options)))[1].tokens for prompt in prompts]
    assert [replies[place].tokens for place in range(3)] == alone and alone[0] == truths[0]


def steps(chat: Chat) -> list[int]:
    """Takes the number of tokens of each step of more than one."""
    read: list[int] = []
    step = chat.predictor.decoder.step

    def count_read(tokens: Any, *others: Any) -> Any:
        read.extend([tokens.shape[1]] if tokens.shape[1] > 1 else [])
        return step(tokens, *others)

    chat.predictor.decoder.step = count_read  # type: ignore[method-assign]
    return read


def chatting(folder: str, name: str, **more: Any) -> Any:
    """A model that was saved to converse in words."""
    saved_chat(folder, name, **more)
    return vlm.load(folder, device="cpu", precision="fp32")


@pytest.mark.slow
@torch.no_grad()
def test_twenty_turns_in_words_are_those_of_a_fresh_reading(folder: str) -> None:
    chat = chatting(folder, "chatml").chat(sample=False, max_tokens=8, system="be brief")
    theirs = t.AutoModelForCausalLM.from_pretrained(folder)
    read = steps(chat)
    for question in QUESTIONS:
        chat.say(question)
        asked = chat.tokens()[: chat.reply.read]
        assert chat.reply.tokens == fresh(theirs, asked, None, 8, chat.predictor.ends)
    assert len(read) == 20 and max(read[1:]) < 40


def test_any_template_can_chat(folder: str) -> None:
    """And a refusal of the template is a line, after which the conversation goes on."""
    tokenizer = saved_chat(folder, "chatml")
    (Path(folder) / "chat_template.jinja").write_text(TEMPLATES["mistral_v1"])
    tokenizer.chat_template = TEMPLATES["mistral_v1"]
    model = vlm.load(folder, device="cpu", precision="fp32")
    chat = model.chat(sample=False, max_tokens=4)
    messages = []
    for question in QUESTIONS[:2]:
        answer = chat.say(question)
        messages.append({"role": "user", "content": question})
        ids = tokenizer.apply_chat_template(messages, return_dict=False)
        assert chat.tokens()[: chat.reply.read] == ids
        chat.exchanges[-1].answer = chat.predictor.tokenizer.encode(answer)
        messages.append({"role": "assistant", "content": answer})
    with pytest.raises(UserError, match="the chat template refuses the conversation: Roles must alternate"):
        model.chat(sample=False, max_tokens=4, system="be brief").say("why?")


def test_images_may_be_shown_at_any_turn(folder: str, tmp_path: Path) -> None:
    """And draws are those of a fresh reading."""
    saved_image_text(folder, "smolvlm_tiles")
    first, second, third = photos(tmp_path / "photos", 3)
    model = vlm.load(folder, device="cpu", precision="fp32")
    options: dict[str, Any] = {"temperature": 0.8, "sample": True, "seed": 3, "max_tokens": 12}
    chat = model.chat(first, **options)
    chat.say("what?")
    chat.show(second)
    chat.say("and this?", third)
    chat.say("more?")
    assert [turn.num_images for turn in chat.turns] == [1, 0, 2, 0, 0, 0]
    anew = model.chat(**options)
    anew.exchanges = chat.exchanges[:2]
    anew.say("more?")
    assert anew.reply.tokens == chat.reply.tokens and len(chat.reply.tokens) > 3


def test_conversations_that_take_turns_may_share_what_is_kept(folder: str, tmp_path: Path) -> None:
    saved_image_text(folder, "smolvlm")
    paths = photos(tmp_path / "photos", 2)
    model = vlm.load(folder, device="cpu", precision="fp32")
    alone = [model.chat(path, sample=False, max_tokens=6) for path in paths]
    shared = [Chat(alone[0].predictor, alone[0].options, cache=alone[0]._cache) for _ in paths]
    for chat, path in zip(shared, paths, strict=True):
        chat.show(path)
    for question in QUESTIONS[:3]:
        assert [chat.say(question) for chat in shared] == [chat.say(question) for chat in alone]
    assert shared[0].turns[1] != shared[1].turns[1]


@pytest.mark.slow
def test_a_full_conversation_is_told_and_the_oldest_leaves_by_choice(folder: str) -> None:
    model = chatting(folder, "chatml", room=96)
    chat = model.chat(sample=False, max_tokens=6, system="s")
    with pytest.raises(
        ContextFullError, match=r"the conversation is full: it has \d+ tokens, and the context window 96"
    ):
        for question in QUESTIONS:
            chat.say(question)
    before = chat.turns
    with pytest.raises(ContextFullError):
        chat.say("what is it?")
    assert chat.turns == before
    assert chat.forget()
    answer = chat.say("what is it?")
    alone = model.chat(sample=False, max_tokens=6, system="s")
    alone.exchanges = chat.exchanges[:-1]
    assert alone.say("what is it?") == answer
    leaving = model.chat(sample=False, max_tokens=6, forget=True)
    for question in QUESTIONS:
        leaving.say(question)
    assert len(leaving.tokens()) <= 96 and leaving.turns[-2].text == QUESTIONS[-1]
    chat.reset()
    assert not chat.turns[1:] and not chat.forget()
    assert chat.say("a") == model.chat(sample=False, max_tokens=6, system="s").say("a")


def test_the_image_stays_where_the_oldest_question_leaves(folder: str, tmp_path: Path) -> None:
    saved_image_text(folder, "smolvlm")
    (path,) = photos(tmp_path / "photos", 1)
    chat = vlm.load(folder, device="cpu", precision="fp32").chat(path, sample=False, max_tokens=4)
    chat.say("what?")
    chat.say("why?")
    assert chat.forget() and chat.turns[0] == Turn("user", "why?", (0,))
    assert chat.forget() and not chat.turns
    chat.say("where?")
    assert chat.turns[0] == Turn("user", "where?", (0,))


def test_an_answer_that_is_stopped_stays_as_far_as_it_came(folder: str, monkeypatch: pytest.MonkeyPatch) -> None:
    model = chatting(folder, "llama3")
    whole = model.chat(sample=False, max_tokens=20)
    whole.say("what is it?")
    chat = model.chat(sample=False, max_tokens=20)
    step, faults = Decoder.step, iter([None] * 5 + [KeyboardInterrupt])

    def interrupt_step(*arguments: Any) -> Any:
        if (fault := next(faults, None)) is not None:
            raise fault
        return step(*arguments)

    monkeypatch.setattr(Decoder, "step", interrupt_step)
    with pytest.raises(KeyboardInterrupt):
        chat.say("what is it?")
    assert chat.exchanges[0].answer == whole.reply.tokens[:5]
    anew = model.chat(sample=False, max_tokens=20)
    anew.exchanges = [*chat.exchanges]
    assert chat.say("why?") == anew.say("why?")


def test_texts_that_end_an_answer(folder: str) -> None:
    model = chatting(folder, "gemma")
    whole = model.chat(sample=False, max_tokens=30).say("what is it?")
    cut = whole[8:11]
    stopped = model.chat(sample=False, max_tokens=30, stop=[cut, "never"])
    pieces = list(stopped.stream("what is it?"))
    assert "".join(pieces) == whole[: whole.index(cut)] and stopped.reply.ended


def test_models_that_do_not_converse_say_so(folder: str) -> None:
    saved_image_text(folder, "paligemma")
    for path, words in (
        (folder, "reads single instructions and cannot chat"),
        (FILES / "captioning.ckpt", "has no chat template; use `vlm caption` or `vlm embed`"),
        (FILES / "tagging.ckpt", "chat: not supported for a model for tagging; use model"),
    ):
        with pytest.raises(vlm.Error, match=words):
            vlm.load(path, device="cpu").chat()
