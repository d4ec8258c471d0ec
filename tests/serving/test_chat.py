"""Conversations over HTTP: the official client of this form asks, and hostile requests are refused in a line each."""

import base64
import json
import re
import socket
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from threading import Event
from typing import Any

import pytest
import torch
from chats import PATH, USER, image_content, saved_chat
from hugging import photos
from image_text import saved_image_text
from services import CAPTIONER, client, client_of, running, service, tiny

import vlm
from vlm.checkpoint.file import write
from vlm.checkpoint.load import read
from vlm.cli.main import run
from vlm.data.text.conversation import PLAIN
from vlm.data.text.prompt_form import PromptForm
from vlm.models.context import PLACE
from vlm.tasks.chat.predictor import ChatPredictor

pytest.importorskip("fastapi")
pytest.importorskip("httpx")
from fastapi.testclient import TestClient  # of the extra


@pytest.fixture(scope="module")
def words(tmp_path_factory: Any) -> str:
    """A folder of a model that converses in words."""
    torch.manual_seed(5)
    folder = tmp_path_factory.mktemp("words")
    saved_chat(folder, "chatml", room=512)
    return str(folder)


@pytest.fixture(scope="module")
def images(tmp_path_factory: Any) -> str:
    """A folder of a model that reads images."""
    torch.manual_seed(5)
    folder = tmp_path_factory.mktemp("images")
    saved_image_text(folder, "smolvlm")
    return str(folder)


@pytest.fixture(scope="module")
def paths(tmp_path_factory: Any) -> list[str]:
    return photos(tmp_path_factory.mktemp("photos"), 2)


@pytest.fixture
def official() -> Iterator[Any]:
    """The official client of a service of a folder."""
    openai = pytest.importorskip("openai")
    opened = []

    def of(path: str, **options: Any) -> Any:
        opened.append(client(path, **options))
        return openai.OpenAI(base_url="http://127.0.0.1/v1", api_key="none", http_client=opened[-1], max_retries=0)

    yield of
    for one in opened:
        one.close()


@pytest.mark.slow
def test_the_official_client_gets_the_answers_of_python(official: Any, images: str, paths: list[str]) -> None:
    http = official(images, sample=False)
    (model,) = http.models.list().data
    assert (model.id, model.owned_by) == ("vlm", "vlm")
    truth = vlm.load(images, device="cpu", precision="fp32").chat(sample=False, max_tokens=6, system="be brief")
    messages: list[Any] = [{"role": "system", "content": "be brief"}]
    for question, some in (("what is it?", paths), ("why?", []), ("and 3?", paths[:1])):
        messages.append({"role": "user", "content": image_content(question, *some) if some else question})
        answer = truth.say(question, *some)
        made = http.chat.completions.create(model=model.id, messages=messages, max_tokens=6, temperature=0)
        choice = made.choices[0]
        assert choice.message.content == answer and choice.message.role == "assistant"
        assert choice.finish_reason == ("stop" if truth.reply.ended else "length")
        read, written = truth.reply.read, len(truth.reply.tokens)
        usage = made.usage
        assert (usage.prompt_tokens, usage.completion_tokens, usage.total_tokens) == (read, written, read + written)
        messages.append({"role": "assistant", "content": answer})
        # A text that is encoded anew may have other tokens than those that were written.
        truth.exchanges[-1].answer = truth.predictor.tokenizer.encode(" " + answer)


@pytest.mark.slow
def test_streams_are_the_answers_piece_by_piece(official: Any, words: str) -> None:
    http = official(words)
    asked: Any = {"model": "vlm", "messages": [{"role": "user", "content": "what is it?"}], "max_completion_tokens": 30}
    for options in ({"temperature": 0}, {"temperature": 0.8, "top_p": 0.9, "seed": 7}):
        whole = http.chat.completions.create(**asked, **options)
        stream = http.chat.completions.create(**asked, **options, stream=True, stream_options={"include_usage": True})
        *chunks, last = list(stream)
        assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks) == whole.choices[0].message.content
        assert [chunk.choices[0].finish_reason for chunk in chunks][-1] == whole.choices[0].finish_reason
        assert last.usage == whole.usage and not last.choices
        assert len(chunks) > 5 and len({chunk.id for chunk in [*chunks, last]}) == 1
    other = http.chat.completions.create(**asked, temperature=0.8, top_p=0.9, seed=8)
    assert other.choices[0].message.content != whole.choices[0].message.content


def test_each_event_has_usage_once_it_is_asked_for(official: Any, words: str) -> None:
    """Null but for the last, as the official service sends it."""
    asked: Any = {"model": "vlm", "messages": [USER], "max_tokens": 3, "stream": True}
    for options, known in (({}, []), ({"stream_options": {"include_usage": True}}, ["usage"])):
        chunks = list(official(words).chat.completions.create(**asked, **options))
        assert all([*chunk.model_fields_set & {"usage"}] == known for chunk in chunks)
        assert all(chunk.usage is None for chunk in chunks[: -len(known) or None])


def test_a_model_is_found_by_its_name(official: Any, words: str) -> None:
    openai, name = pytest.importorskip("openai"), "org/a model.v2"
    http = official(words, name=name)
    assert http.models.retrieve(name).id == name == http.models.list().data[0].id
    with pytest.raises(openai.NotFoundError, match="'gpt-9' does not exist"):
        http.models.retrieve("gpt-9")
    plain = client(words, name=name)
    for path, code in (("org/a%20model.v2", 200), ("org%2Fa%20model.v2", 200), ("org", 404), ("", 404), ("org/", 404)):
        answer = plain.get(f"/v1/models/{path}")
        assert answer.status_code == code and ("error" in answer.json()) == (code == 404)


def test_stop_texts_end_an_answer_and_are_no_part_of_it(official: Any, words: str) -> None:
    http = official(words)
    asked: Any = {"model": "vlm", "messages": [{"role": "user", "content": "what is it?"}], "temperature": 0}
    text = http.chat.completions.create(**asked, max_tokens=30).choices[0].message.content
    stop = text[9:12]
    made = http.chat.completions.create(**asked, max_tokens=30, stop=["never", stop])
    assert made.choices[0].message.content == text[: text.index(stop)]
    assert made.choices[0].finish_reason == "stop" and made.usage.completion_tokens < 30
    stream = http.chat.completions.create(**asked, max_tokens=30, stop=stop, stream=True)
    assert "".join(chunk.choices[0].delta.content or "" for chunk in stream) == text[: text.index(stop)]


@pytest.mark.slow
def test_without_a_seed_answers_differ(words: str) -> None:
    body = {"messages": [USER], "max_tokens": 24, "temperature": 1}

    def answers(http: Any, **fields: Any) -> list[str]:
        made = [http.post(PATH, json=body | fields) for _ in range(3)]
        return [one.json()["choices"][0]["message"]["content"] for one in made]

    drawn = answers(client(words))
    assert len({*drawn}) == 3
    for seed in (0, 5):
        fixed = answers(client(words, seed=seed))
        assert len({*fixed}) == 1 and fixed == answers(client(words), seed=seed) != drawn
    other = answers(client(words, seed=5), seed=6)
    assert other == answers(client(words), seed=6) and other != fixed
    prompt = {"text": "a", "max_tokens": 24}  # /predict: of the seed and the input
    texts = [client(words, **{"seed": seed} if seed else {}).post("/predict", json=prompt) for seed in (0, 0, 5, 5)]
    first, second, third, fourth = [one.json()["results"][0]["text"] for one in texts]
    assert first == second != third == fourth


def test_the_command_prints_the_address_of_conversations(words: str, monkeypatch: pytest.MonkeyPatch) -> None:
    printed = list[str]()
    monkeypatch.setattr("vlm.serving.serve.listen", lambda app, *, lines, **options: printed.extend(lines) or 0)
    assert run(["serve", "-c", words]) == 0
    assert f"chat        http://127.0.0.1:{{port}}/v1 (model {Path(words).name})" in printed


def test_an_option_that_conversations_do_not_have_is_named(
    words: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("vlm.serving.serve.listen", lambda app, **options: 0)
    assert run(["serve", "-c", words, "--beam", "3", "--max-tokens", "9"]) == 0
    assert capsys.readouterr().err == "warning: --beam applies only to /predict, not to conversations\n"


@pytest.mark.slow
def test_the_command_gives_its_seed_to_conversations(words: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """`--seed 0` too, which is not the same as no seed."""
    found = []
    monkeypatch.setattr("vlm.serving.serve.listen", lambda app, **options: found.append(app) or 0)
    body = {"messages": [USER], "max_tokens": 24, "temperature": 1}
    for seed, count in (["--seed", "0"], 1), (["--seed", "7"], 1), ([], 3):
        assert run(["serve", "-c", words, "--precision", "fp32", *seed]) == 0
        http = TestClient(found[-1], base_url="http://127.0.0.1")
        texts = {http.post(PATH, json=body).json()["choices"][0]["message"]["content"] for _ in range(3)}
        assert len(texts) == count


def test_conversations_without_a_seed_share_a_batch(words: str, monkeypatch: pytest.MonkeyPatch) -> None:
    ours, sizes, go = service(words), list[int](), Event()
    real = ChatPredictor._fill_replies

    def replies(self: Any, batch: Any, *args: Any) -> Any:
        sizes.append(len(batch))
        assert go.wait(30)
        return real(self, batch, *args)

    monkeypatch.setattr(ChatPredictor, "_fill_replies", replies)
    body = {"messages": [USER], "max_tokens": 8, "temperature": 1}
    with client_of(ours) as http, ThreadPoolExecutor(8) as pool:
        answers = [pool.submit(http.post, PATH, json=body) for _ in range(7)]
        until = time.monotonic() + 30
        while (not sizes or ours.engine.waiting + sizes[0] < 7) and time.monotonic() < until:
            time.sleep(0.005)
        go.set()
        assert all(one.result().status_code == 200 for one in answers)
    assert len(sizes) <= 2 and sum(sizes) == 7


@pytest.mark.slow
def test_many_conversations_at_a_time_are_each_as_alone(images: str, paths: list[str]) -> None:
    contents = [[{"role": "user", "content": image_content(f"what {n}?", *paths[: n % 3])}] for n in range(8)]
    bodies = [{"messages": content, "max_tokens": 8, "seed": n // 4} for n, content in enumerate(contents)]
    with client(images) as http, ThreadPoolExecutor(8) as pool:  # all in one event loop, as a server has it
        alone = [http.post(PATH, json=body).json()["choices"] for body in bodies]
        assert list(pool.map(lambda body: http.post(PATH, json=body).json()["choices"], bodies)) == alone


@pytest.mark.parametrize(
    ("path", "asked"), [(PATH, {"messages": [USER]}), ("/v1/completions", {"prompt": ["a", "b"], "n": 2})]
)
def test_a_client_that_goes_ends_its_answer(words: str, path: str, asked: dict[str, Any]) -> None:
    pytest.importorskip("uvicorn")
    from vlm.serving.app import make_app

    ours = service(words)
    body = json.dumps({**asked, "max_tokens": 400, "temperature": 0})
    with running(make_app(ours), log_level="error") as port:
        for content in (body, body[:-1] + ', "stream": true}'):
            head = f"POST {path} HTTP/1.1\r\nHost: 127.0.0.1\r\nContent-Type: application/json\r\n"
            with socket.create_connection(("127.0.0.1", port)) as line:
                line.sendall(f"{head}Content-Length: {len(content)}\r\n\r\n{content}".encode())
                while not ours.engine.running:
                    time.sleep(0.005)
                while "stream" in content and b"data: " not in line.recv(4096):
                    pass
            until = time.monotonic() + 20
            while ours.engine.running and time.monotonic() < until:
                time.sleep(0.005)
            assert ours.engine.running == ours.engine.waiting == 0
    assert ours.measurements.requests[path, 499] == 1


def test_a_key_and_the_sites_hold_here_too(words: str) -> None:
    http = client(words, key="secret")
    body = {"messages": [{"role": "user", "content": "a"}], "max_tokens": 2}
    assert http.get("/v1/models").status_code == 401
    refused = http.post(PATH, json=body)
    assert refused.status_code == 401 and "the key is missing" in refused.json()["error"]["message"]
    bearer = {"Authorization": "Bearer secret"}
    assert http.post(PATH, json=body, headers=bearer).status_code == 200
    assert http.post(PATH, json=body, headers=bearer | {"Origin": "http://example.org"}).status_code == 403
    assert http.post(PATH, json=body, headers=bearer | {"Host": "example.org"}).status_code == 421


PNG = "data:image/png;base64,"
DEEP = "[" * 100_000 + "]" * 100_000


def image(url: Any) -> dict[str, Any]:
    return {"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": url}]}]}


SHOWN = image({"url": PNG})["messages"][0]["content"]
HOSTILE: dict[str, tuple[Any, int, str]] = {
    "megabytes of an image": (image({"url": PNG + "A" * 2**23}), 413, "bytes"),
    "no object": ([1], 400, "not a JSON object"),
    "no JSON": (b"{", 400, "is not JSON"),
    "nested": (DEEP.encode(), 400, "is not JSON"),
    "nested inside": (f'{{"messages": {DEEP}}}'.encode(), 400, "is not JSON"),
    "no UTF-8": (b'{"messages": "\xff"}', 400, "is not JSON"),
    "many values": (b'{"messages": [' + b"1," * 10**6 + b"1]}", 413, "more than 65,536 values"),
    "empty": ({"messages": []}, 400, "messages: must be a list"),
    "messages of text": ({"messages": "hello"}, 400, "messages: must be a list"),
    "10,000 turns": ({"messages": [USER] * 10_000}, 400, "messages: has 10,000"),
    "a message that is none": ({"messages": [3]}, 400, "message 1: role"),
    "role unknown": ({"messages": [{"role": "judge", "content": "a"}]}, 400, "role is judge, not one of system"),
    "role of another type": ({"messages": [{"role": ["user"], "content": "a"}]}, 400, "message 1: role is"),
    "no content": ({"messages": [{"role": "user"}]}, 400, "must be a string or a list"),
    "content of a number": ({"messages": [{"role": "user", "content": 7}]}, 400, "must be a string or a list"),
    "a part that is none": ({"messages": [{"role": "user", "content": [7]}]}, 400, "type of a part must be"),
    "sound": ({"messages": [{"role": "user", "content": [{"type": "input_audio"}]}]}, 400, "type of a part must be"),
    "calls": ({"messages": [USER | {"tool_calls": [1]}]}, 400, "tool_calls is not supported"),
    "the last is the model": ({"messages": [USER, {"role": "assistant", "content": "a"}]}, 400, "must have role"),
    "megabytes": ({"messages": [{"role": "user", "content": "word " * 10**6}]}, 413, "more than 1,048,576"),
    "long": ({"messages": [{"role": "user", "content": "word " * 10**4}]}, 400, "the conversation is full"),
    "special": ({"messages": [{"role": "user", "content": "a<end_of_utterance>"}]}, 400, "contains the special token"),
    "surrogate": (b'{"messages": [{"role": "user", "content": "\\ud800"}]}', 400, "is not UTF-8"),
    "http": (image({"url": "http://127.0.0.1/a.png"}), 400, "is not a data URL"),
    "file": (image({"url": "file:///etc/passwd"}), 400, "is not a data URL"),
    "no base64": (image({"url": PNG + "###"}), 400, "is not valid base64"),
    "no marker": (image({"url": "data:image/png,abc"}), 400, "is not valid base64"),
    "no image": (image({"url": PNG + base64.b64encode(b"no image at all").decode()}), 400, "message 1"),
    "empty image": (image({"url": PNG}), 400, "message 1"),
    "no url": (image({}), 400, "has no url"),
    "url of another type": (image({"url": [PNG]}), 400, "has no url"),
    "image of text": (image(PNG), 400, "the file is empty"),
    "an image of the model": (
        {"messages": [{"role": "assistant", "content": SHOWN}, USER]},
        400,
        "only user messages can contain images",
    ),
    "other model": ({"messages": [USER], "model": "gpt-9"}, 404, "'gpt-9' does not exist"),
    "model of another type": ({"messages": [USER], "model": 3}, 400, "model: expected a string, not 3"),
    "stream of another type": ({"messages": [USER], "stream": "yes"}, 400, 'stream: expected true or false, not "yes"'),
    "unknown": ({"messages": [USER], "nonsense": 1}, 400, "nonsense: not supported"),
    "nine": ({"messages": [USER], "n": 9}, 400, "n: expected an integer .* at most 8"),
    "best without logprobs": ({"messages": [USER], "top_logprobs": 3}, 400, 'needs "logprobs": true'),
    "a bias": ({"messages": [USER], "logit_bias": {"a": 1}}, 400, "'a' is not the id of a token"),
    "tools": ({"messages": [USER], "tools": [{"type": "function"}]}, 400, r"tools: only \[\]"),
    "batch": ({"messages": [USER], "batch_size": 9}, 400, "batch_size: not supported"),
    "no tokens": ({"messages": [USER], "max_tokens": 0}, 400, "max_tokens"),
    "tokens of text": ({"messages": [USER], "max_tokens": "many"}, 400, "max_tokens"),
    "tokens": ({"messages": [USER], "max_tokens": 10**9}, 400, "max_tokens"),
    "two numbers": ({"messages": [USER], "max_tokens": 3, "max_completion_tokens": 4}, 400, "have different values"),
    "temperature": ({"messages": [USER], "temperature": -1}, 400, "temperature"),
    "not a number": (b'{"messages": [{"role": "user", "content": "a"}], "temperature": NaN}', 400, "temperature"),
    "top_p": ({"messages": [USER], "top_p": 3}, 400, "top_p: 3 is invalid"),
    "seed": ({"messages": [USER], "seed": "a"}, 400, "seed"),
    "stop": ({"messages": [USER], "stop": [1]}, 400, "stop: must be a string"),
    "many stops": ({"messages": [USER], "stop": ["a"] * 99}, 400, "stop: has 99 strings"),
}


@pytest.fixture(scope="module")
def asked(images: str) -> Any:
    ours = service(images, max_bytes=2**23)
    return ours, client_of(ours)


@pytest.mark.parametrize("name", HOSTILE)
def test_a_hostile_request_has_one_answer(asked: Any, name: str) -> None:
    """Which disturbs nothing else: the next request is answered as before, and nothing is left behind."""
    ours, http = asked
    body, status, words = HOSTILE[name]
    sent: Any = {"content": body, "headers": {"Content-Type": "application/json"}} if isinstance(body, bytes) else {}
    answer = http.post(PATH, **(sent or {"json": body}))
    assert answer.status_code == status, answer.text
    told = answer.json()["error"]
    assert re.search(words, told["message"]) and len(told["message"].splitlines()) == 1 and len(told["message"]) < 500
    good = http.post(PATH, json={"messages": [USER], "max_tokens": 3, "temperature": 0})
    assert good.status_code == 200 and good.json()["usage"]["completion_tokens"] <= 3
    assert ours.engine.waiting == 0 and ours.body_limiter.size == 0 and ours.reader.budget.used == 0


def test_images_beyond_the_window_are_refused_before_they_are_decoded(asked: Any, monkeypatch: Any) -> None:
    _, http = asked
    monkeypatch.setattr(ChatPredictor, "prepare", None)
    many = {"messages": [{"role": "user", "content": SHOWN * 1000}]}
    answer = http.post(PATH, json=many)
    assert answer.status_code == 400 and "the conversation is full" in answer.json()["error"]["message"]


def test_images_keep_their_places_in_any_user_turn(asked: Any, paths: list[str], monkeypatch: Any) -> None:
    """The model reads what its processor makes of the same messages."""
    ours, http = asked
    read: list[list[int]] = []
    prepare = ChatPredictor.prepare

    def prepare_and_note(self: Any, *arguments: Any) -> Any:
        prompt = prepare(self, *arguments)
        read.append([*prompt.tokens])
        return prompt

    monkeypatch.setattr(ChatPredictor, "prepare", prepare_and_note)
    part, *_ = image_content("", paths[0])
    text = [{"type": "text", "text": word} for word in ("first", "second", "third")]
    messages = [
        {"role": "system", "content": "be brief"},
        {"role": "user", "content": [text[0], part, text[1]]},
        {"role": "assistant", "content": "a dog"},
        {"role": "user", "content": [part, part, text[2]]},
    ]
    answer = http.post(PATH, json={"messages": messages, "max_tokens": 1})
    assert answer.status_code == 200, answer.text
    form, tokenizer = ours.chat.predictor.form, ours.chat.predictor.tokenizer
    image = f"{form.before}{'<image>' * form.states}{form.after}"
    prompt = (
        f"<|im_start|>System: be brief<end_of_utterance>\nUser: first{image}second<end_of_utterance>\n"
        f"Assistant: a dog<end_of_utterance>\nUser:{image}{image}third<end_of_utterance>\nAssistant:"
    )
    assert read == [[PLACE if id == form.image_id else id for id in tokenizer.encode_marked(prompt)]]


def test_models_that_do_not_converse_say_so() -> None:
    for path, task, kind in ((CAPTIONER, "captioning", "an image"), (tiny("tagging"), "tagging", "a text")):
        http = client(path)
        words = f"a model for {task} does not chat; send {kind} to POST /predict (see GET /)"
        answer = http.post(PATH, json={"messages": [USER]})
        assert answer.status_code == 404 and answer.json()["error"]["message"] == words
        assert http.get("/v1/models").status_code == 200  # for embeddings
        assert f"There is no {PATH}: {words}." in http.get("/").text


@pytest.mark.parametrize(
    ("task", "how"), [("captioning", "by cross-attention"), ("image_questions", "without causal attention")]
)
def test_models_that_read_images_beside_conversations_say_what_to_train(
    task: str, how: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """What task=conversations makes by default; once, `vlm serve` offered conversations with it without an image."""
    loaded = read(tiny(task))
    loaded["vlm"] |= {"task": "image_questions", "form": PromptForm(chat=PLAIN, starts=False).state()}
    write(path := tmp_path / "conversations.ckpt", loaded)
    answer = client(str(path)).post(PATH, json={"messages": [USER]})
    assert answer.status_code == 404 and "to chat, train" in answer.json()["error"]["message"]
    with pytest.raises(vlm.Error, match=f"{how}.*{re.escape('model.fusion.causal=true')}"):
        vlm.load(path, device="cpu").chat()
    assert run(["chat", "-c", str(path), "--device", "cpu"]) == 2 and "model=vision_language" in capsys.readouterr().err
    printed = list[str]()
    monkeypatch.setattr("vlm.serving.serve.listen", lambda app, *, lines, **options: printed.extend(lines) or 0)
    assert run(["serve", "-c", str(path)]) == 0 and not any("chat" in line for line in printed)


def test_other_paths_answer_as_before(words: str) -> None:
    http = client(words)
    assert http.get("/nowhere").json() == {"detail": "/nowhere: not found; GET / lists the paths"}
    assert http.get("/predict").json() == {"detail": "/predict: GET is not allowed; use POST"}
    assert http.post("/predict", json={"text": "a", "max_tokens": 3}).status_code == 200
    http.post(PATH, json={"messages": [USER], "max_tokens": 1})
    for path in ("/predict", PATH):
        assert f'vlm_requests_total{{endpoint="{path}",code="200"}} 1' in http.get("/metrics").text


@pytest.mark.slow
def test_the_lines_of_the_page_run_as_written(
    words: str, images: str, paths: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any
) -> None:
    openai = pytest.importorskip("openai")
    page = (Path(__file__).parents[2] / "docs" / "chat.md").read_text(encoding="utf-8")
    python, asked = re.findall(r"```python\n(.*?)```", page, re.DOTALL)
    monkeypatch.chdir(tmp_path)
    (tmp_path / "SmolVLM-256M-Instruct").symlink_to(images)
    (tmp_path / "photo.jpg").symlink_to(paths[0])
    exec(python, {"vlm": vlm})
    kind, http = openai.OpenAI, client(words)
    monkeypatch.setattr(openai, "OpenAI", lambda **options: kind(**options, http_client=http))
    exec(asked.replace("127.0.0.1:8000", "127.0.0.1"), {})
    assert capsys.readouterr().out.strip()


def test_thoughts_cannot_be_turned_off_silently(tmp_path: Path) -> None:
    """The template of Qwen3 has a switch for them, which is not supported; other templates have none."""
    torch.manual_seed(5)
    off = ({"reasoning_effort": "none"}, {"chat_template_kwargs": {"enable_thinking": False}})
    for name, status in (("qwen3", 400), ("chatml", 200)):
        saved_chat(tmp_path / name, name, room=512)
        http = client(str(tmp_path / name))
        on = {"chat_template_kwargs": {"enable_thinking": True}}
        for fields, code in ((on, 200), *((one, status) for one in off)):
            answer = http.post(PATH, json={"messages": [USER], "max_tokens": 2, **fields})
            assert answer.status_code == code, answer.text
            assert code == 200 or next(iter(fields)) in answer.json()["error"]["message"]
