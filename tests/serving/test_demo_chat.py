"""The conversation on the page of `vlm demo`, over HTTP."""

import base64
import html
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from chats import saved_chat
from hugging import photos
from image_text import saved_image_text
from pages import answers as asked
from pages import page_of
from tiny_checkpoints import FILES

import vlm
from vlm.io.page import escape

pytest.importorskip("gradio")
pytest.importorskip("httpx")


def send_message(http: Any, *data: Any, **options: Any) -> list[str]:
    """What the page shows of a conversation after something is said, as it grows."""
    return asked(http, *data, None, outputs=3, **options)


def answers(shown: str) -> list[str]:
    return [html.unescape(text) for text in re.findall(r"<p><b>Model</b> (.*?)</p>", shown, re.DOTALL)]


@pytest.fixture
def folder(tmp_path: Path) -> str:
    torch.manual_seed(5)
    return str(tmp_path / "theirs")


@pytest.mark.slow
def test_a_conversation_about_a_photo_streams(folder: str, tmp_path: Path) -> None:
    """And two visitors have one each."""
    saved_image_text(folder, "smolvlm")
    path, other = photos(tmp_path / "photos", 2)
    sent = ["data:;base64," + base64.b64encode(Path(one).read_bytes()).decode() for one in (path, other)]
    model = vlm.load(folder, device="cpu", precision="fp32")
    truth = [model.chat(one, sample=False) for one in (path, other)]
    with page_of(folder) as http:
        for question in ("what is it?", "why?"):
            for session, chat, photo in zip(("one", "two"), truth, sent, strict=True):
                shown = send_message(http, photo, question, 0.0, session=session)
                chat.say(question)
                texts = [turn.text for turn in chat.turns if turn.role == "assistant"]
                assert answers(shown[-1]) == [html.unescape(escape(text)) for text in texts]
                assert len(shown) > 3 and len(shown[0]) < len(shown[-1])
        damaged = send_message(http, "data:;base64,AAAA", "why?", 0.0, session="three")[-1]
        assert "photo: damaged, or not an image" in damaged


@pytest.mark.slow
def test_what_is_wrong_is_a_line_and_the_conversation_goes_on(folder: str) -> None:
    saved_chat(folder, "chatml")
    with page_of(folder) as http:
        first = answers(send_message(http, "what is it?", 0.0)[-1])
        wrong = {" ": "has 0 characters", "a<|im_end|>": "contains the special token", "x" * 20_001: "20,001"}
        for words, line in wrong.items():
            shown = send_message(http, words, 0.0)[-1]
            assert line in shown and answers(shown) == first
        assert answers(send_message(http, "why?", 0.0)[-1])[:1] == first


def test_a_model_that_does_not_converse_has_no_conversation() -> None:
    with page_of(str(FILES / "captioning.ckpt")) as http:
        assert "<h2>Conversation" not in http.get("/config").text
