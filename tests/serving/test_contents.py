"""Images in base64: decoded as browsers do, in the JSON of /predict and in data URLs of conversations."""

import base64
import urllib.parse
from pathlib import Path
from typing import Any

import pytest
import torch
from chats import PATH
from image_text import saved_image_text
from services import CAPTIONER, client
from tiny_checkpoints import IMAGES

pytest.importorskip("fastapi")
pytest.importorskip("httpx")
from vlm.serving.reader import decode_base64

# Of the web-platform-tests, fetch/data-urls/resources/base64.json.
DECODED = {
    "": [],
    "abcd": [105, 183, 29],
    " abcd": [105, 183, 29],
    "abcd ": [105, 183, 29],
    "ab": [105],
    "abc": [105, 183],
    "ab==": [105],
    "abc=": [105, 183],
    "ab\tcd": [105, 183, 29],
    "ab\ncd": [105, 183, 29],
    "ab\fcd": [105, 183, 29],
    "ab\rcd": [105, 183, 29],
    "ab cd": [105, 183, 29],
    "ab\t\n\f\r cd": [105, 183, 29],
    " \t\n\f\r ab\t\n\f\r cd\t\n\f\r ": [105, 183, 29],
    "ab\t\n\f\r =\t\n\f\r =\t\n\f\r ": [105],
    "/A": [252],
    "//A": [255, 240],
    "///A": [255, 255, 192],
    "A/": [3],
    "AA/": [0, 15],
    "AAA/": [0, 0, 63],
    "YQ": [97],
    "YR": [97],
}
INVALID = [" abcd===", "abcd=== ", "abcd ===", "a", "abcde", "=", "==", "===", "====", "=====", "a=", "a==", "a==="]
INVALID += ["a====", "ab=", "ab===", "ab====", "abc==", "abc===", "abcd=", "abcd==", "abcde=", "abcde===", "=a", "=a="]
INVALID += ["a=b", "a=b=", "ab=c", "ab=c=", "abc=d", "abc=d=", "ab\xa0cd", "A", "////A", "/", "AAAA/", "\x00nonsense"]
INVALID += ["abcd\x00nonsense", "~~", "??"]


@pytest.mark.parametrize(("text", "content"), DECODED.items())
def test_base64_is_decoded_as_in_browsers(text: str, content: list[int]) -> None:
    assert decode_base64(text.encode()) == bytes(content)


@pytest.mark.parametrize("text", INVALID)
def test_what_browsers_refuse_is_refused(text: str) -> None:
    with pytest.raises(ValueError):
        decode_base64(text.encode())


def test_the_alphabet_for_urls_is_read_too() -> None:
    assert decode_base64(base64.urlsafe_b64encode(bytes(range(256)))) == bytes(range(256))


def forms_of(content: bytes) -> dict[str, str]:
    """The ways in which programs write bytes in base64."""
    plain = base64.b64encode(content).decode()
    return {
        "plain": plain,
        "lines of 76 (encodebytes)": base64.encodebytes(content).decode(),
        "a line end (base64 FILE)": plain + "\n",
        "without padding": plain.rstrip("="),
        "for URLs": base64.urlsafe_b64encode(content).decode(),
    }


def test_images_in_any_form_of_base64_have_the_same_caption() -> None:
    http, forms = client(CAPTIONER), forms_of(Path(IMAGES[0]).read_bytes())
    answers = http.post("/predict", json={"images": [*forms.values()]}).json()["results"]
    assert len({answer["text"] for answer in answers}) == 1 and answers[0]["text"]


@pytest.mark.slow
def test_data_urls_in_any_form_have_the_same_answer(tmp_path: Path) -> None:
    torch.manual_seed(5)
    saved_image_text(tmp_path, "smolvlm")
    http, forms = client(str(tmp_path)), forms_of(Path(IMAGES[0]).read_bytes())
    links: list[Any] = [f"data:image/png;base64,{text}" for text in forms.values()]
    links += ["data:image/png;base64," + urllib.parse.quote(text, safe="") for text in forms.values()]
    links += [f" DATA:;BASE64,{forms['plain']} ", f"data:image/jpeg;charset=utf-8; base64,{forms['plain']}"]
    answers = []
    for image in [*({"url": link} for link in links), links[0]]:
        content = [{"type": "text", "text": "what?"}, {"type": "image_url", "image_url": image}]
        body = {"messages": [{"role": "user", "content": content}], "temperature": 0, "max_tokens": 4}
        answers.append(http.post(PATH, json=body).json()["choices"][0]["message"]["content"])
    assert len({*answers}) == 1
