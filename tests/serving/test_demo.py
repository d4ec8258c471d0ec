"""The page of `vlm demo` without Gradio: its forms, results as HTML, the run's examples, and its guard."""

import asyncio
import base64
import json
import re
from io import BytesIO
from math import exp

import numpy as np
import pytest
from PIL import Image
from predictions import predict_inputs
from tiny_checkpoints import FILES, IMAGES, ROOT, STORY

from vlm.data.images.image import load_image
from vlm.inference.attention.maps import read_attention
from vlm.inference.options import ModelOptions
from vlm.inference.predictor import BatchPredictor, load_predictor
from vlm.serving import demo_forms as html
from vlm.serving.demo_forms import Form, Values, build_form
from vlm.serving.demo_page import example_images, example_texts, find_samples_folder
from vlm.tasks.span_answering.predict import SpanAnswer

CAPTIONER = str(ROOT / "data" / "sample" / "captioner.ckpt")
PHOTO = load_image(IMAGES[1])
WRITING = ("greedy", "beams", "samples")


def load(path: str):
    return ModelOptions(checkpoint=path, device="cpu", precision="fp32").load(load_predictor)


def last(form: Form, **values) -> str:
    """The answer as it stands in the end."""
    return list(form.answer(Values(**values)))[-1]


@pytest.fixture(scope="module")
def captioner():
    return load(CAPTIONER)


def test_a_caption_has_its_words_with_bars_and_lights(captioner):
    form = build_form(captioner)
    assert (form.photos, form.texts, form.modes, form.is_streamed) == (1, {}, WRITING, False)
    shown = last(form, photos=[PHOTO])
    (text,) = predict_inputs(captioner, [PHOTO])
    assert re.findall(r"<b>(\w+)</b>", shown) == text.text.split()
    assert f"confidence {text.confidence:.1%}, log-probability {text.logprob:.2f}" in shown
    assert shown.count('class="v-light"') == len(text.text.split()) == shown.count("tabindex")
    assert shown.count(":hover) .v-light") == len(text.text.split()) and "<script" not in shown


def test_a_light_is_bright_where_the_model_looked(captioner):
    (text,) = predict_inputs(captioner, [PHOTO])
    reading = (captioner.model, captioner.tokenizer, captioner.preprocess, captioner.pixels(PHOTO))
    _, weights = read_attention(*reading, text.tokens).words[3]
    corner = np.zeros_like(weights)
    corner[0, -1] = 1
    for maps in (weights, corner):
        picture = Image.open(BytesIO(base64.b64decode(html.render_heatmap(maps).partition(",")[2])))
        alpha = np.asarray(picture.convert("RGBA").resize(maps.shape[::-1], Image.Resampling.BOX))[..., 3]
        assert alpha.argmin() == maps.argmax()  # least is laid over the place


@pytest.mark.slow
def test_beams_are_listed_and_drawn_as_a_tree(captioner):
    form = build_form(captioner)
    texts = predict_inputs(captioner, [PHOTO], beam=3, results=3)[0]
    shown = last(form, photos=[PHOTO], mode="beams", count=3)
    lines = [" ".join(re.findall(r"<b>(\w+)</b>", part)) for part in shown.split('<p class="v-text">')[1:]]
    assert lines == [text.text for text in texts]
    tree = shown.partition("<details")[2]
    assert tree.count("<ul>") == tree.count("</ul>") > 1 and tree.count("<li") == tree.count("</li>")
    for text in texts:  # each ends in the tree with its log-probability
        assert f"{html.END} <small>{text.logprob:.2f}</small>" in tree
    first, again, other = (last(form, photos=[PHOTO], mode="samples", seed=seed) for seed in (1, 1, 2))
    assert first == again != other
    assert first.count("v-text") == 4 and "<details" not in first


QUESTION = "how many circles are there?"
TEXTS = ["a red circle", "a blue cross"]
PHOTOS = {"photos": [PHOTO]}
GAP, ASKED = "a [MASK] red circle", "what is left of the cross?"
CASES = {  # how many photos, texts, other values, and what is shown
    "classification": (1, {}, PHOTOS, lambda it: predict_inputs(it, [PHOTO], top=10)[0].top),
    "contrastive": (
        *(1, {"label": "\n".join(TEXTS), "prompt": ""}, PHOTOS),
        lambda it: predict_inputs(it, [PHOTO], label=TEXTS, top=10)[0].top,
    ),
    "detection": (
        *(1, {"find": "red cross; red circle"}, PHOTOS),
        lambda it: [(one.label, one.score) for one in predict_inputs(it, [PHOTO], find="red cross; red circle")[0]],
    ),
    "embedding": (0, {"text": TEXTS[0]}, {}, lambda it: [" ".join(predict_inputs(it, TEXTS[:1])[0].astype(str))]),
    "image_questions": (
        *(1, {"question": QUESTION}, PHOTOS),
        lambda it: [
            (answer := predict_inputs(it, [PHOTO], question=QUESTION)[0]).text or "(empty)",
            exp(answer.logprob),
        ],
    ),
    "masked_language_modeling": (
        *(0, {"text": GAP}, {}),
        lambda it: [(one := predict_inputs(it, [GAP], top=10)[0]).text, *one.gaps[0].items()],
    ),
    "photo_translation": (
        1,
        {"text": TEXTS[0]},
        PHOTOS,
        lambda it: predict_inputs(it, TEXTS[:1], image=PHOTO)[0].text.split(),
    ),
    "span_answering": (
        *(0, {"text": STORY, "question": ASKED}, {}),
        lambda it: [predict_inputs(it, [STORY], question=ASKED)[0].text or "no answer"],
    ),
    "tagging": (0, {"text": TEXTS[0]}, {}, lambda it: [one.tag for one in predict_inputs(it, TEXTS[:1])[0]]),
    "text_classification": (
        *(0, {"text": TEXTS[0], "pair": TEXTS[1]}, {}),
        lambda it: predict_inputs(it, TEXTS[:1], pair=TEXTS[1:], top=10)[0].top,
    ),
    "text_to_image": (0, {"text": TEXTS[0]}, {}, lambda it: []),  # which the next test looks at
    "translation": (0, {"text": TEXTS[0]}, {}, lambda it: predict_inputs(it, TEXTS[:1])[0].text.split()),
}


def strip_markup(shown: str) -> str:
    return re.sub(r"\s+", " ", re.sub("<[^>]*>", " ", shown))


@pytest.mark.sample(plain=2, slow=4)
@pytest.mark.parametrize("task", CASES)
def test_each_task_has_a_form_that_answers_as_python_does(task):
    photos, texts, values, truth = CASES[task]
    model = load(str(FILES / f"{task}.ckpt"))
    form = build_form(model)
    assert form.photos == photos and list(form.texts) == list(texts) and not form.is_streamed
    options = {name: one.value for name, one in form.options.items()}
    shown = strip_markup(last(form, texts=texts, options=options, **values))
    for one in truth(model):
        pair = one if isinstance(one, tuple) else (one,)
        for part in pair:
            assert (f"{part:.1%}" if isinstance(part, float) else part.strip()) in shown
    assert form.modes == (WRITING if "translation" in task else ())


def test_drawn_pictures_are_shown_enlarged():
    model = load(str(FILES / "text_to_image.ckpt"))
    form = build_form(model)
    assert {name: option.value for name, option in form.options.items()} == {"results": 1, "seed": 0}
    shown = last(form, texts={"text": '"red"'}, options={"results": 2, "seed": 3})
    pictures = [Image.open(BytesIO(base64.b64decode(data))) for data in re.findall(r"base64,([^\"]+)", shown)]
    (truth,) = predict_inputs(model, ['"red"'], results=2, seed=3)
    assert [picture.size for picture in pictures] == [(256, 256)] * 2 and shown.count('alt="&quot;red&quot;"') == 2
    small = [picture.resize((32, 32), Image.Resampling.NEAREST) for picture in pictures]
    assert [picture.tobytes() for picture in small] == [picture.tobytes() for picture in truth]


def test_a_language_model_writes_piece_by_piece():
    model = load(str(FILES / "language_modeling.ckpt"))
    form = build_form(model)
    assert form.is_streamed and form.optional == ("text",)
    pieces = list(form.answer(Values(texts={"text": "A large"}, mode="greedy", tokens=16)))
    (whole,) = predict_inputs(model, ["A large"], max_tokens=16, sample=False)
    assert len(pieces) > 8 and html.render_continuation("A large", whole.text) == pieces[-1]
    assert all(one.startswith(html.render_continuation("A large", "").removesuffix("</div>")) for one in pieces)


def test_a_task_of_ones_own_has_a_form_too():
    """A predictor that says no more than its base: a text in, its record out."""

    class Own(BatchPredictor):
        task, fields = "own", ("text", "length")

        def __init__(self):
            pass

        def restore(self, about):
            pass

        def predict(self, batch, options):
            return [{"text": text, "length": len(text)} for text in batch]

        def record(self, source, result, options, *, form="jsonl"):
            return [result]

    form = build_form(Own())
    assert (form.photos, form.texts) == (0, {"text": "Text"})
    assert "<small>length</small> 5" in last(form, texts={"text": "a < c"})


def test_the_tasks_of_this_test_are_all():
    assert {*CASES, "captioning", "language_modeling"} == {path.stem for path in FILES.glob("*.ckpt")}


HOSTILE = '<img src=x onerror="alert(1)">&\x1b'


@pytest.mark.parametrize(
    "shown",
    [
        html.render_error(HOSTILE),
        html.render_bars([(HOSTILE, 0.5)]),
        html.render_continuation(HOSTILE, HOSTILE),
        html.render_result(SpanAnswer(HOSTILE, 0, 0.5), HOSTILE),
        html.render_tags([html.TaggedWord(HOSTILE, HOSTILE, 0.5)]),
        html.render_texts([html.ScoredText(-1.0, 0.5, [(HOSTILE, 0.5)], [np.eye(3)])], "data:", HOSTILE),
        html.render_beam_tree([{"id": 0, "parent": None, "kept": True, "token": HOSTILE, "total": 0.0}], end="</s>"),
        html.render_result({HOSTILE: HOSTILE}),
    ],
)
def test_texts_are_no_markup(shown):
    assert "<img src=x" not in shown and "\x1b" not in shown
    assert not re.search(r'="[^"]*" ?onerror="', shown)


def test_an_answer_is_marked_where_it_stands():
    assert html.render_result(SpanAnswer("b", 2, 0.5), "a b b").endswith("a <mark>b</mark> b</div>")
    assert "no answer" in html.render_result(SpanAnswer("", -1, 0.5), "a b")


def test_examples_are_those_of_the_runs_folder(tmp_path):
    samples = tmp_path / "samples"
    (tmp_path / "checkpoints").mkdir()
    assert find_samples_folder(tmp_path / "checkpoints" / "best.ckpt") == find_samples_folder(tmp_path) == samples
    assert example_images(samples) == [] == example_texts(samples, ["text"])
    samples.mkdir()
    for number in range(10):
        PHOTO.save(samples / f"more{number}.png")
    (samples / "more0.png").write_bytes(b"no image")
    assert len(example_images(samples)) == 7
    records = [{"text": "a red circle", "gaps": [2], "true": ["\u2581red"]}, {"words": ["a", "b"]}, {"other": 1}]
    (samples / "step_9.jsonl").write_text("{}\n")
    (samples / "step_10.jsonl").write_text("\n".join(map(json.dumps, records)))
    assert example_texts(samples, ["text"]) == [["a [MASK] circle"], ["a b"]]
    (samples / "step_11.jsonl").write_text('{"caption": "a"}\n{"caption": "b"}\n{"caption": "a"}')
    assert example_texts(samples, ["label"]) == [["a\nb"]]
    (samples / "step_12.jsonl").write_text('{"text": "a\u2028b"}\n{"text": "c"}\n', encoding="utf-8")
    assert example_texts(samples, ["text"]) == [["a\u2028b"], ["c"]]
    (samples / "step_13.jsonl").write_text("no JSON")
    assert example_texts(samples, ["text"]) == []


def request(guard, path: str = "/", body: bytes = b"", **scope) -> tuple[int, str, list]:
    """The status of a request behind a guard, its body, and its headers."""
    parts = [body[at : at + 1000] for at in range(0, max(1, len(body)), 1000)]
    messages = [{"type": "http.request", "body": part, "more_body": part is not parts[-1]} for part in parts]
    sent: list[dict] = []

    async def receive():
        return messages.pop(0)

    async def send(message):
        sent.append(message)

    headers = [(b"host", scope.pop("host", b"127.0.0.1:7860"))]
    method = "POST" if body else "GET"
    about = {"type": "http", "path": path, "method": method, "headers": headers, "query_string": b"deep_link=x"}
    asyncio.run(guard({**about, **scope}, receive, send))
    text = b"".join(message.get("body", b"") for message in sent).decode()
    return sent[0]["status"], text, sent[0]["headers"]


@pytest.fixture
def guarded():
    """A guard before an application that tells the query and the size of the body that it was handed."""
    pytest.importorskip("starlette")
    from vlm.serving.demo import Guard

    async def app(scope, receive, send):
        body = (await receive())["body"] if scope["method"] == "POST" else b""
        await send({"type": "http.response.start", "status": 200, "headers": []})
        await send({"type": "http.response.body", "body": f"{scope['query_string'].decode()} {len(body)}".encode()})

    return Guard(app, local=True, max_bytes=5000, rate=3)


def test_the_guard_lets_the_page_through_and_seals_it(guarded):
    status, text, headers = request(guarded)
    assert (status, text) == (200, " 0")
    assert dict(headers)[b"content-security-policy"].startswith(b"default-src 'self' ")
    assert request(guarded, "/assets/index-a.b_c.js")[0] == request(guarded, "/gradio_api/queue/data")[0] == 200


HIDDEN = "file=/etc/passwd upload proxy=http://a.b/ info run/x component_server"
PATHS = [*(f"/gradio_api/{path}" for path in HIDDEN.split()), "/assets/../../x", "/monitoring", "/login", "/docs", "//"]


@pytest.mark.parametrize("path", PATHS)
def test_the_guard_hides_what_the_page_does_not_need(guarded, path):
    assert request(guarded, path)[:2] == (404, '{"detail":"not found"}')


def test_the_guard_takes_plain_values_up_to_a_size_and_a_rate(guarded):
    join = "/gradio_api/queue/join"
    body = json.dumps({"data": ["x" * 3000, 1, None]}).encode()
    assert request(guarded, join, body)[:2] == (200, f"deep_link=x {len(body)}")
    hostile = {"data": [{"path": "http://a.b/", "meta": {"_type": "gradio.FileData"}}]}
    refused = (422, '{"detail":"this page does not send such requests"}')
    assert request(guarded, join, json.dumps(hostile).encode())[:2] == refused
    assert request(guarded, join, b"x" * 5001)[:2] == (413, '{"detail":"the body has more than 5,000 bytes"}')
    assert request(guarded, join, body)[0] == 429
    assert request(guarded, join, body, client=("10.0.0.2", 1))[0] == 200


def test_the_guard_answers_to_names_of_this_machine_alone(guarded):
    assert request(guarded, host=b"evil.example")[0] == 421
    assert request(guarded, headers=[(b"host", b"127.0.0.1"), (b"origin", b"http://evil.example")])[0] == 403
    assert request(guarded, host=b"[::1]:7860")[0] == request(guarded, host=b"localhost")[0] == 200
    guarded.origin_policy.local = False
    assert request(guarded, host=b"evil.example")[0] == 200
