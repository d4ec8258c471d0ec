"""Completions and log-probabilities over HTTP: equal to what transformers computes for the same folders."""

import json
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from chats import PATH, USER, saved_chat, tokenizer_of
from hugging import saved_decoder, saved_gpt2
from services import CAPTIONER, client, predictor_of, tiny

from vlm.cli.main import run
from vlm.serving.token_logprobs import describe_token

pytest.importorskip("fastapi")
pytest.importorskip("httpx")
COMPLETIONS = "/v1/completions"
FAMILIES = ("llama3", "qwen3", "gemma")
RAW = {"frequency_penalty": 1.5, "presence_penalty": -0.5, "logit_bias": {"40": 3, "7": -100}}
DECODING: dict[str, dict[str, Any]] = {
    "greedy": {"temperature": 0},
    "sampled": {"temperature": 1.4, "seed": 5},
    "sampled from few": {"temperature": 0.7, "top_p": 0.9, "seed": 5, "n": 2},
    "penalized": {"temperature": 0, **RAW},
    "sampled and penalized": {"temperature": 1, "seed": 2, **RAW},
}


class Family:
    """A folder of a family: the model and tokenizer of transformers, and a client of a service of it."""

    def __init__(self, folder: Path, name: str) -> None:
        torch.manual_seed(5)
        if name == "gpt2":
            self.model, self.tokenizer = saved_gpt2(folder)
        else:
            self.model, self.tokenizer = saved_decoder(folder, name, tokenizer=tokenizer_of("chatml"))
        self.http, ours = client(str(folder)), predictor_of(str(folder)).tokenizer  # type: ignore[attr-defined]
        self.chat_ids = {self.name_of(*describe_token(ours, id)): id for id in range(ours.vocab_size)}
        assert len(self.chat_ids) == ours.vocab_size
        self.ids = {
            f"bytes:{text}" if raw is not None and bytes(raw) != text.encode() else text: id
            for (text, raw), id in ((describe_token(ours, id), id) for id in range(ours.vocab_size))
        }
        assert len(self.ids) == ours.vocab_size

    @staticmethod
    def name_of(text: str, raw: list[int] | None) -> tuple[str, tuple[int, ...] | None]:
        return text, None if raw is None else tuple(raw)

    @torch.no_grad()
    def logits(self, ids: list[int]) -> torch.Tensor:
        """Logits after each token, (L, V)."""
        return self.model(torch.tensor([ids])).logits[0].double()


@pytest.fixture(scope="module", params=[*FAMILIES, "gpt2"])
def family(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Family:
    return Family(tmp_path_factory.mktemp(request.param.replace("2", "")), request.param)


def stream_of(http: Any, path: str, body: dict[str, Any]) -> list[dict[str, Any]]:
    """The choices of a streamed answer, put together from its chunks."""
    answer = http.post(path, json=body | {"stream": True})
    assert answer.status_code == 200, answer.text
    *events, done = [line.removeprefix("data: ") for line in answer.text.split("\n\n")[:-1]]
    assert done == "[DONE]"
    choices: dict[int, dict[str, Any]] = {}
    for event in events:
        for part in json.loads(event)["choices"]:
            whole = choices.setdefault(part["index"], {"text": "", "logprobs": {}, "finish_reason": None})
            whole["text"] += part["text"] if "text" in part else part["delta"].get("content", "")
            for name, values in (part["logprobs"] or {}).items():
                if values is not None:
                    whole["logprobs"].setdefault(name, []).extend(values)
            assert whole["finish_reason"] is None
            whole["finish_reason"] = part["finish_reason"]
    return [choices[index] for index in sorted(choices)]


@pytest.mark.sample(plain=3, slow=12)
@pytest.mark.parametrize("streamed", [False, True], ids=["whole", "streamed"])
@pytest.mark.parametrize("decoding", DECODING)
def test_logprobs_of_completions_are_those_of_transformers(family: Family, decoding: str, streamed: bool) -> None:
    prompt = family.tokenizer("two dogs run", add_special_tokens=False).input_ids
    body = {"prompt": prompt, "max_tokens": 9, "logprobs": 3, "echo": True, **DECODING[decoding]}
    whole = family.http.post(COMPLETIONS, json=body).json()["choices"]
    choices = stream_of(family.http, COMPLETIONS, body) if streamed else whole
    assert len(choices) == body.get("n", 1)
    for choice, same in zip(choices, whole, strict=True):
        shown = choice["logprobs"]
        assert (choice["text"], shown) == (same["text"], same["logprobs"])
        ids = [family.ids[token] for token in shown["tokens"]]
        assert ids[: len(prompt)] == prompt and len(ids) > len(prompt)
        truth = family.logits(ids).log_softmax(-1)
        assert shown["token_logprobs"][0] is None and shown["top_logprobs"][0] is None
        for place in range(1, len(ids)):
            row, token, top = truth[place - 1], shown["tokens"][place], shown["top_logprobs"][place]
            assert shown["token_logprobs"][place] == pytest.approx(row[ids[place]].item(), abs=2e-4)
            assert top[token] == shown["token_logprobs"][place]
            best = {family.ids[name] for name in top} - ({ids[place]} if len(top) > 3 else set())
            assert best == {*row.topk(3).indices.tolist()}
            assert top == {name: pytest.approx(row[family.ids[name]].item(), abs=2e-4) for name in top}
        assert choice["finish_reason"] == ("stop" if ids[-1] == family.tokenizer.eos_token_id else "length")


@pytest.mark.sample(plain=3, slow=12)
@pytest.mark.parametrize("streamed", [False, True], ids=["whole", "streamed"])
@pytest.mark.parametrize("decoding", DECODING)
@pytest.mark.parametrize("family", FAMILIES, indirect=True)
def test_logprobs_of_conversations_are_those_of_transformers(family: Family, decoding: str, streamed: bool) -> None:
    prompt = family.tokenizer.apply_chat_template([USER], add_generation_prompt=True, return_dict=False)
    body = {"messages": [USER], "max_tokens": 9, "logprobs": True, "top_logprobs": 4, **DECODING[decoding]}
    whole = family.http.post(PATH, json=body).json()["choices"]
    choices: list[dict[str, Any]] = [{**choice, "text": choice["message"]["content"]} for choice in whole]
    if streamed:
        parts = stream_of(family.http, PATH, body)
        assert [(one["text"], one["logprobs"]["content"]) for one in parts] == [
            (one["text"], one["logprobs"]["content"]) for one in choices
        ]
        choices = parts
    for choice in choices:
        content = choice["logprobs"]["content"]
        ids = [family.chat_ids[family.name_of(one["token"], one["bytes"])] for one in content]
        raw = b"".join(bytes(one["bytes"] or []) for one in content)
        assert raw.decode("utf-8", "replace").lstrip() == choice["text"]
        truth = family.logits([*prompt, *ids]).log_softmax(-1)[len(prompt) - 1 :]
        for row, id, one in zip(truth, ids, content, strict=False):
            assert one["logprob"] == pytest.approx(row[id].item(), abs=2e-4)
            top = {
                family.chat_ids[family.name_of(other["token"], other["bytes"])]: other for other in one["top_logprobs"]
            }
            assert top[id]["logprob"] == one["logprob"]
            assert {*top} == {*row.topk(4).indices.tolist(), id}
            assert all(other["logprob"] == pytest.approx(row[key].item(), abs=2e-4) for key, other in top.items())


def test_echo_is_a_forward_pass(family: Family) -> None:
    """Without a further token, with one as evaluation harnesses ask, and several prompts at once."""
    prompts = [
        family.tokenizer(text, add_special_tokens=False).input_ids for text in ("a red rock", "the water !", "a")
    ]
    prompts = [list(ids) for ids in prompts]
    for max_tokens in (0, 1):
        body = {"prompt": prompts, "max_tokens": max_tokens, "logprobs": 1, "echo": True, "temperature": 0}
        choices = family.http.post(COMPLETIONS, json=body).json()["choices"]
        for ids, choice in zip(prompts, choices, strict=True):
            logits, shown = family.logits(ids), choice["logprobs"]
            truth = logits.log_softmax(-1)[:-1].gather(1, torch.tensor(ids)[1:, None])[:, 0].tolist()
            assert shown["token_logprobs"][: len(ids)] == [None, *(pytest.approx(one, abs=2e-4) for one in truth)]
            assert [family.ids[token] for token in shown["tokens"][len(ids) :]] == logits.argmax(-1).tolist()[-1:][
                :max_tokens
            ]
            assert len(shown["tokens"]) == len(ids) + max_tokens


@pytest.mark.parametrize("penalties", [RAW, {"logit_bias": {"40": 100}}, {"presence_penalty": 2}], ids=str)
def test_penalties_and_biases_change_the_choice_as_openai_defines_them(family: Family, penalties: Any) -> None:
    prompt = list(family.tokenizer("two dogs run", add_special_tokens=False).input_ids)
    ids = list[int]()
    bias = {int(token): value for token, value in penalties.get("logit_bias", {}).items()}
    while len(ids) < 12 and family.tokenizer.eos_token_id not in ids:
        logits = family.logits(prompt + ids)[-1]
        for token in {*ids, *bias}:
            count = ids.count(token)
            logits[token] -= count * penalties.get("frequency_penalty", 0)
            logits[token] -= (count > 0) * penalties.get("presence_penalty", 0)
            logits[token] += bias.get(token, 0)
        ids.append(int(logits.argmax()))
    body = {"prompt": prompt, "max_tokens": 12, "logprobs": 0, "temperature": 0, **penalties}
    choice = family.http.post(COMPLETIONS, json=body).json()["choices"][0]
    assert [family.ids[token] for token in choice["logprobs"]["tokens"]] == ids
    plain = family.http.post(COMPLETIONS, json={"prompt": prompt, "max_tokens": 12, "temperature": 0}).json()
    assert plain["choices"][0]["text"] != choice["text"]


@pytest.fixture(scope="module")
def words(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """A client of a service of a model that converses in words."""
    torch.manual_seed(5)
    saved_chat(folder := tmp_path_factory.mktemp("words"), "chatml", room=64)
    return client(str(folder))


def test_choices_are_ordered_and_have_consecutive_seeds(words: Any) -> None:
    body = {"prompt": ["a red", "the dog"], "max_tokens": 8, "temperature": 1, "seed": 4}
    made = words.post(COMPLETIONS, json=body | {"n": 3})
    choices, usage = made.json()["choices"], made.json()["usage"]
    assert [choice["index"] for choice in choices] == list(range(6)) and made.headers["X-Vlm-Seed"] == "4"
    alone = [
        words.post(COMPLETIONS, json=body | {"prompt": text, "seed": seed}).json()
        for text in body["prompt"]  # type: ignore[attr-defined]
        for seed in (4, 5, 6)
    ]
    assert [choice["text"] for choice in choices] == [one["choices"][0]["text"] for one in alone]
    assert usage["prompt_tokens"] == sum(one["usage"]["prompt_tokens"] for one in alone) / 3
    assert usage["completion_tokens"] == sum(one["usage"]["completion_tokens"] for one in alone)
    talked = words.post(PATH, json={"messages": [USER], "max_tokens": 8, "n": 8, "temperature": 1}).json()
    assert len({choice["message"]["content"] for choice in talked["choices"]}) > 4


@pytest.mark.parametrize(
    ("path", "body"),
    [
        (PATH, {"messages": [USER], "n": 4, "temperature": 1, "seed": 3, "stop": ["a", "e"], "max_tokens": 30}),
        (COMPLETIONS, {"prompt": [[5] * 60, [6], [7] * 50], "temperature": 0, "max_tokens": 40}),
    ],
)
def test_a_streamed_choice_ends_before_the_others_do(words: Any, path: str, body: dict[str, Any]) -> None:
    more = {"stream": True, "stream_options": {"include_usage": True}}
    *parts, usage, done = words.post(path, json=body | more).text.split("\n\n")[:-1]
    choices = [json.loads(part.removeprefix("data: "))["choices"][0] for part in parts]
    indices = [choice["index"] for choice in choices]
    ends = {choice["index"]: place for place, choice in enumerate(choices) if choice["finish_reason"]}
    lengths = {index: indices.count(index) for index in indices}
    assert len(ends) == len(lengths) > 2 and min(ends.values()) < len(choices) - len(ends)
    shortest, longest = min(lengths, key=lengths.__getitem__), max(lengths, key=lengths.__getitem__)
    assert longest in indices[ends[shortest] :] and shortest not in indices[ends[shortest] + 1 :]
    assert '"choices": [], "usage": {"prompt_tokens": ' in usage and done == "data: [DONE]"
    reasons = [choice["finish_reason"] for choice in words.post(path, json=body).json()["choices"]]
    assert [choices[ends[index]]["finish_reason"] for index in sorted(ends)] == reasons


def test_a_request_without_a_seed_gets_one_that_repeats_it(words: Any) -> None:
    for path, body in ((PATH, {"messages": [USER]}), (COMPLETIONS, {"prompt": "a"})):
        body |= {"max_tokens": 12, "temperature": 1.0}
        first, second = (words.post(path, json=body) for _ in range(2))
        assert first.headers["X-Vlm-Seed"] != second.headers["X-Vlm-Seed"]
        again = words.post(path, json=body | {"seed": int(first.headers["X-Vlm-Seed"])})
        assert again.json()["choices"] == first.json()["choices"] != second.json()["choices"]
        with words.stream("POST", path, json=body | {"stream": True}) as streamed:
            assert int(streamed.headers["X-Vlm-Seed"]) >= 0 and b"[DONE]" in streamed.read()


def test_texts_are_continued_as_they_are(words: Any) -> None:
    ask = partial(words.post, COMPLETIONS)
    body = {"prompt": "a red", "max_tokens": 20, "temperature": 0}
    plain = ask(json=body).json()["choices"][0]
    echoed = ask(json=body | {"echo": True, "logprobs": 2}).json()["choices"][0]
    assert echoed["text"] == "a red" + plain["text"] and plain["finish_reason"] == "length"
    shown = echoed["logprobs"]
    assert len({len(values) for values in shown.values()}) == 1
    for token, offset in zip(shown["tokens"], shown["text_offset"], strict=True):
        assert token.startswith("bytes:") or echoed["text"][offset:].startswith(token)
    stop = plain["text"][6:8]
    cut = ask(json=body | {"stop": stop, "logprobs": 0}).json()["choices"][0]
    assert cut["text"] == plain["text"][: plain["text"].index(stop)] and cut["finish_reason"] == "stop"
    assert all(offset < len(cut["text"]) for offset in cut["logprobs"]["text_offset"])
    (streamed,) = stream_of(words, COMPLETIONS, body | {"stop": stop, "logprobs": 0})
    assert (streamed["text"], streamed["logprobs"]) == (cut["text"], cut["logprobs"])
    assert len(ask(json={"max_tokens": 1}).json()["choices"]) == 1  # an empty prompt starts a document
    assert ask(json={"prompt": "a"}).json()["usage"]["completion_tokens"] <= 16


def test_a_prompt_may_fill_the_window(words: Any) -> None:
    for length, status in ((64, 200), (65, 400)):
        body = {"prompt": [5] * length, "max_tokens": 1, "echo": True, "logprobs": 1}
        made = words.post(COMPLETIONS, json=body)
        assert made.status_code == status
    assert made.json()["error"]["code"] == "context_length_exceeded"
    assert len(words.post(COMPLETIONS, json={"prompt": [5] * 60, "max_tokens": 99}).json()["choices"]) == 1


WRONG: dict[str, tuple[dict[str, Any], str, str]] = {
    "no tokens": ({"prompt": []}, "prompt", "has no tokens"),
    "no token of the vocabulary": ({"prompt": [[5], [999_999]]}, "prompt", "prompt 2: 999999 is not the id"),
    "a negative id": ({"prompt": [-1]}, "prompt", "-1 is not the id"),
    "mixed prompts": ({"prompt": ["a", [1]]}, "prompt", "expected a string or a list"),
    "a number": ({"prompt": 3}, "prompt", "expected a string"),
    "surrogates": ({"prompt": "\ud800"}, "prompt", "surrogate"),
    "many prompts": ({"prompt": ["a"] * 65}, "prompt", "65 prompts x n 1 exceed the maximum of 64 texts"),
    "many choices": ({"n": 9}, "n", "at most 8), not 9"),
    "no choice": ({"n": 0}, "n", "at least 1"),
    "the best of several": ({"best_of": 2}, "best_of", "only 1 is supported; send n"),
    "a suffix": ({"suffix": "end"}, "suffix", "does not fill in a gap"),
    "many logprobs": ({"logprobs": 21}, "logprobs", "at most 20), not 21"),
    "logprobs of chat": ({"logprobs": True}, "logprobs", "expected an integer"),
    "messages": ({"messages": [USER]}, "messages", "not supported"),
    "a penalty": ({"frequency_penalty": 3}, "frequency_penalty", "at most 2"),
    "a bias of no token": ({"logit_bias": {"x": 1}}, "logit_bias", "'x' is not the id of a token"),
    "a bias of another token": ({"logit_bias": {"999999": 1}}, "logit_bias", "'999999' is not the id"),
    "a large bias": ({"logit_bias": {"3": 101}}, "logit_bias", "must be from -100 to 100"),
    "a bias of text": ({"logit_bias": {"3": "a"}}, "logit_bias", "logit_bias: expected"),
    "negative length": ({"max_tokens": -1}, "max_tokens", "at least 0"),
    "another model": ({"model": "gpt-9"}, "model", "does not exist"),
    "unknown": ({"nonsense": 1}, "nonsense", "not supported"),
}


@pytest.mark.parametrize("name", WRONG)
def test_a_wrong_request_is_refused_by_name(words: Any, name: str) -> None:
    fields, param, line = WRONG[name]
    made = words.post(COMPLETIONS, content=json.dumps({"prompt": "a"} | fields))
    error = made.json()["error"]
    assert made.status_code == (404 if name == "another model" else 400)
    assert error["param"] == param and line in error["message"] and len(error["message"].splitlines()) == 1, error


def test_requests_beyond_the_budget_are_refused_before_work_starts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    torch.manual_seed(5)
    saved_chat(tmp_path, "chatml", room=2**16)
    http = client(str(tmp_path))
    monkeypatch.setattr("vlm.serving.engine.Engine.submit", None)
    body = {"max_tokens": 2**15, "n": 8}
    for path, more in ((PATH, {"messages": [USER]}), (COMPLETIONS, {"prompt": "a"})):
        error = http.post(path, json=body | more).json()["error"]
        assert (error["param"], error["code"]) == ("n", "token_budget_exceeded"), error
        assert "n 8 x max_tokens may be 262,144 tokens; the maximum is 131,072" in error["message"]
    scored = {"prompt": ["a " * 1000] * 30, "max_tokens": 1, "logprobs": 20, "echo": True}
    error = http.post(COMPLETIONS, json=scored).json()["error"]
    assert error["param"] == "logprobs" and "numbers; the maximum is 524,288" in error["message"]


def test_models_without_a_chat_template_complete_and_others_say_what_to_use() -> None:
    http = client(tiny("language_modeling"))
    made = http.post(COMPLETIONS, json={"prompt": "A large", "max_tokens": 4})
    assert made.status_code == 200 and made.json()["object"] == "text_completion"
    assert [one["id"] for one in http.get("/v1/models").json()["data"]] == ["vlm"]
    assert http.post(PATH, json={"messages": [USER]}).status_code == 404
    for path, task, kind in ((CAPTIONER, "captioning", "an image"), (tiny("tagging"), "tagging", "a text")):
        answer = client(path).post(COMPLETIONS, json={"prompt": "a"})
        line = f"a model for {task} does not complete texts; send {kind} to POST /predict (see GET /)"
        assert answer.status_code == 404 and answer.json()["error"]["message"] == line


def test_the_command_prints_the_address_of_completions(monkeypatch: pytest.MonkeyPatch) -> None:
    printed = list[str]()
    monkeypatch.setattr("vlm.serving.serve.listen", lambda app, *, lines, **options: printed.extend(lines) or 0)
    assert run(["serve", "-c", tiny("language_modeling")]) == 0
    assert "complete    http://127.0.0.1:{port}/v1 (model language_modeling)" in printed


def test_endpoints_that_are_not_supported_name_the_one_that_is(words: Any) -> None:
    paths = ("/v1/responses", "/v1/responses/1", "/v1/audio/speech", "/v1/audio/transcriptions", "/v1/images/edits")
    for path in paths:
        for answer in (words.post(path, json={}), words.get(path)):
            error = answer.json()["error"]
            assert answer.status_code == 404 and error["message"].startswith(f"{path}: not supported; use {PATH}")
            assert {*error} == {"message", "type", "param", "code"}


def test_keys_and_origins_hold_on_each_path(tmp_path: Path) -> None:
    torch.manual_seed(5)
    saved_chat(tmp_path, "chatml", room=64)
    http = client(str(tmp_path), key="secret")
    for path in (COMPLETIONS, "/v1/responses", "/v1/audio/speech", "/v1/images/generations"):
        assert http.post(path, json={"prompt": "a"}).status_code == 401
        bearer = {"Authorization": "Bearer secret"}
        assert http.post(path, json={"prompt": "a"}, headers=bearer).status_code in (200, 404)
        assert http.post(path, json={}, headers=bearer | {"Origin": "http://example.org"}).status_code == 403
        assert http.post(path, json={}, headers=bearer | {"Host": "example.org"}).status_code == 421
