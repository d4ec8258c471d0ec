"""The page of `vlm demo`, built with Gradio: a form on the left, results on the right, or a conversation."""

import base64
import json
import re
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import gradio as gr
from fastapi import FastAPI
from PIL import Image

from vlm.data.images.image import SUFFIXES, ImageError, load_image
from vlm.data.text.words import split_lines
from vlm.decoding.continuation import KeptText
from vlm.errors import UserError
from vlm.inference.command_options import GAP, AnswerOptions
from vlm.inference.predictor import Predictor
from vlm.inference.tasks import resolve, tasks_of
from vlm.io.page import escape, thumbnail
from vlm.serving import demo_forms as html
from vlm.serving.demo_forms import Field, Form, Values
from vlm.tasks.chat.predictor import ChatPredictor
from vlm.tasks.chat.session import Chat

MOST = 8  # most images, and most texts
MAX_RECORDS_BYTES = 2**22
FIELDS = {"text": ("prompt", "text", "context", "words"), "label": ("caption",)}  # of records, by the form's names


def samples_of(checkpoint: Path) -> Path:
    """Returns the folder of a run's samples, given its checkpoint or its folder."""
    folder = checkpoint if checkpoint.is_dir() else checkpoint.parent
    return (folder.parent if folder.name == "checkpoints" else folder) / "samples"


def example_images(samples: Path) -> list[Image.Image]:
    """Returns the readable images of a folder."""
    paths = sorted(path for path in samples.glob("*") if path.suffix.lower() in SUFFIXES) if samples.is_dir() else []
    images: list[Image.Image] = []
    for path in paths[:MOST]:
        try:
            images.append(load_image(path))
        except ImageError:  # the page does without it
            continue
    return images


def example_texts(samples: Path, fields: Sequence[str]) -> list[list[str]]:
    """Returns texts of the newest samples, a row for each that has all fields of a form.

    Args:
        fields: Names of the fields.
    """
    paths = sorted(samples.glob("step_*.jsonl"), key=_step) if samples.is_dir() and fields else []
    if not paths or paths[-1].stat().st_size > MAX_RECORDS_BYTES:
        return []
    try:
        records = [json.loads(line) for line in split_lines(paths[-1].read_text(encoding="utf-8"))]
    except (OSError, ValueError):
        return []
    records = [record for record in records if isinstance(record, dict)]
    rows = [[_text(record, name) for name in fields] for record in records]
    if list(fields) == ["label"]:  # all are texts to choose among
        rows = [["\n".join(dict.fromkeys(row[0] for row in rows[:MOST] if row[0]))]]
    return [row for row in rows if all(row)][:MOST]


def _step(path: Path) -> int:
    number = re.search(r"\d+", path.stem)
    return int(number[0]) if number else 0


def _text(record: Mapping[str, Any], name: str) -> str:
    value = next((record[key] for key in FIELDS.get(name, (name,)) if key in record), "")
    text = " ".join(map(str, value)) if isinstance(value, list) else str(value)
    if record.get("gaps") and record.get("true"):  # a text with masked words
        return text.replace(str(record["true"][0]).strip("\u2581"), GAP, 1)
    return text


MAX_TEXT = 20_000  # characters of a message
HOTTEST = 2.0  # greatest temperature of the slider
HINT = "What you say, and the answers, stand here."


def chat_of(predictor: Predictor) -> ChatPredictor | None:
    """Returns a predictor for conversations with the same model; None if the model cannot converse."""
    command = tasks_of("chat").get(predictor.task)
    if command is None:
        return None
    found: ChatPredictor = resolve(command.predictor).around(predictor)
    try:
        found.check_chat()
    except UserError:
        return None
    return found


class Talk:
    """The conversations of a page. Gradio remembers each visitor's; they share the cache of kept texts.

    Args:
        predictor: The model.
        photo: Opens a photo of the form, given the field's value and its place.
    """

    def __init__(self, predictor: ChatPredictor, photo: Callable[[str, int], Image.Image]) -> None:
        self.predictor, self.photo, self.kept = predictor, photo, KeptText(predictor.decoder)
        sampling, *_ = predictor.planned(AnswerOptions())
        self.temperature = sampling.temperature  # that of `vlm chat` without options
        self.hottest = max(HOTTEST, self.temperature)

    def answer(self, *inputs: Any) -> Iterator[tuple[str, Any, str]]:
        """Yields the growing conversation as HTML, its state to remember, and the text of the input field.

        Args:
            inputs: The photo, if the model reads one; the words; the temperature; the remembered state.
        """
        *sources, words, temperature, known = inputs
        chat, shown = known or (None, "")
        try:
            options = AnswerOptions(sample=True, temperature=self._bounded(temperature))
            chat = chat or Chat(self.predictor, options, forget=True, kept=self.kept)
            chat.options = options
            source = str(sources[0] or "") if sources else ""
            if source and source != shown:
                chat.show(self.photo(source, 1))
                shown = source
            text = str(words or "").strip()
            if not 0 < len(text) <= MAX_TEXT:
                raise UserError(f"your words: have {len(text):,} characters; write 1 to {MAX_TEXT:,}")
            text.encode()
            for _ in chat.stream(text):
                yield talked(chat), (chat, shown), ""
            yield talked(chat), (chat, shown), ""
        except UserError as fault:
            yield talked(chat) + html.refusal(str(fault)), (chat, shown), str(words or "")
        except UnicodeEncodeError:
            yield talked(chat) + html.refusal("your words: are not UTF-8"), (chat, shown), ""
        except Exception:  # a fault of the model
            traceback.print_exc()
            yield talked(chat) + html.refusal("the model failed; its log says why"), None, ""

    def _bounded(self, value: Any) -> float:
        """Returns a temperature in the slider's range, whatever was sent."""
        return min(max(float(value), 0.0), self.hottest) if isinstance(value, int | float) else self.temperature

    def blocks(self, photos: Sequence[Any], **model: Any) -> None:
        """Adds the conversation below a form, whose photos it reads.

        Args:
            model: Gradio's options for functions that run the model.
        """
        gr.HTML("<h2>A conversation</h2>", elem_classes="v-head")
        with gr.Row():
            with gr.Column(scale=2, min_width=300):
                words = gr.Textbox(label="Say something, about the photo above too" if photos else "Say something")
                label = "Temperature of the conversation"
                temperature = gr.Slider(0.0, self.hottest, self.temperature, step=0.05, label=label)
                with gr.Row():
                    button = gr.Button("Say", variant="primary", min_width=100)
                    stop = gr.Button("Stop", min_width=100)
                    anew = gr.Button("Begin anew", min_width=100)
            with gr.Column(scale=3, min_width=300):
                shown = gr.HTML(html.hint(HINT), js_on_load=None)
        known, private = gr.State(None), dict[str, Any](api_visibility="private")
        outputs = [shown, known, words]
        asked: Any = {"inputs": [*photos, words, temperature, known], "outputs": outputs, **private, **model}
        event = gr.on([button.click, words.submit], self.answer, **asked)
        stop.click(None, cancels=[event], **private)
        anew.click(lambda: (html.hint(HINT), None, ""), None, outputs, cancels=[event], **private)


def talked(chat: Chat | None) -> str:
    """A conversation as HTML."""
    turns = [] if chat is None else chat.turns
    names = {"user": "You", "assistant": "Model"}
    lines = (f"<p><b>{names[turn.role]}</b> {escape(turn.text)}</p>" for turn in turns)
    return f'<div class="v-flow" aria-live="polite">{"".join(lines)}</div>'


HERE = Path(__file__).parent
SESSIONS = 16  # most sessions whose values Gradio remembers
# Fields of `Values` in order, with minimum, maximum, step and label of their sliders.
BOUNDS: dict[str, tuple[Any, ...]] = {
    "count": (2, 8, 1, "Beams, or samples"),
    "temperature": (0.05, 2.0, 0.05, "Temperature of samples"),
    "seed": (0, 99, 1, "Seed of samples"),
    "tokens": (16, 512, 16, "Longest text, in tokens"),
}
MODEL: dict[str, Any] = {"concurrency_id": "model", "concurrency_limit": 1}  # one request computes at a time
SHOW = """() => {
  const result = document.getElementById('result');
  if (result.getBoundingClientRect().top > innerHeight / 2) result.scrollIntoView({behavior: 'smooth'});
}"""  # on a phone the result is below the form
FONTS = ["system-ui", "-apple-system", "Segoe UI", "Roboto", "DejaVu Sans", "sans-serif"]
MONO = ["ui-monospace", "Menlo", "Consolas", "DejaVu Sans Mono", "monospace"]


class Page:
    """The page of a model.

    Args:
        task: The task's name.
        name: Name of the checkpoint.
        form: The model's form.
        samples: The folder of the run's samples.
        max_bytes: Size of the largest photo.
        chat: The predictor for conversations, if the model supports them.
    """

    def __init__(
        self, *, task: str, name: str, form: Form, samples: Path, max_bytes: int, chat: ChatPredictor | None = None
    ) -> None:
        self.task, self.name, self.form, self.max_bytes = task.replace("_", " "), name, form, max_bytes
        self.talk = None if chat is None else Talk(chat, self.photo)
        images = example_images(samples) if form.photos else []
        self.images = {str(place): image for place, image in enumerate(images)}
        self.rows = example_texts(samples, list(form.texts))

    def answer(self, *inputs: Any) -> Iterator[str]:
        """Yields the answer to the form as HTML, or a message about a wrong value."""
        if self.form.photos and not any(inputs[: self.form.photos]):  # an option may change before a photo is chosen
            yield html.hint("Drop a photo, or choose an example.")
            return
        try:
            yield from self.form.answer(self.values(inputs))
        except UserError as fault:
            yield html.refusal(str(fault))
        except Exception:  # a fault of the model: the inputs were valid
            traceback.print_exc()
            yield html.refusal("the model failed; its log says why")

    def values(self, inputs: Sequence[Any]) -> Values:
        """Reads the values of the form.

        Raises:
            UserError: A value is wrong.
        """
        remaining = iter(inputs)
        sources = [str(next(remaining) or "") for _ in range(self.form.photos)]
        photos = [self.photo(source, place) for place, source in enumerate(sources, start=1) if source]
        texts = {name: self.text(name, str(next(remaining) or "")) for name in self.form.texts}
        language = _known(next(remaining), self.form.languages) if self.form.languages else None
        options = {name: _typed(one, next(remaining)) for name, one in self.form.options.items()}
        options |= {} if language is None else {"language": language}
        way = _known(next(remaining, None), self.form.ways) or self.form.defaults.way
        bounded = {name: self._bounded(name, option) for name, option in zip(BOUNDS, remaining, strict=False)}
        return Values(photos, texts, options, way, **bounded)

    def photo(self, source: str, place: int) -> Image.Image:
        """Opens a photo of the form: an example by its number, or a file's bytes in base64."""
        kind, _, content = source.partition(":")
        name = f"photo {place}" if self.form.photos > 1 else "photo"
        if kind == "example" and content in self.images:
            return self.images[content]
        if kind == "large":
            raise UserError(f"{name}: is too large; {self.max_bytes:,} bytes are the most")
        try:
            return load_image(base64.b64decode(content.partition(",")[2], validate=True))
        except ValueError as fault:
            raise UserError(f"{name}: is incomplete; try again") from fault
        except ImageError as fault:
            raise UserError(str(fault).replace("<bytes>", name, 1)) from fault

    def text(self, name: str, text: str) -> str:
        label = self.form.texts[name]
        if len(text) > MAX_TEXT:
            raise UserError(f"{label}: has {len(text):,} characters; {MAX_TEXT:,} are the most")
        if not text.strip() and name not in self.form.optional:
            raise UserError(f"{label}: is empty; write one")
        try:
            text.encode()
        except UnicodeEncodeError as fault:
            raise UserError(f"{label}: is not UTF-8") from fault
        return text

    def blocks(self) -> gr.Blocks:
        """Builds the page."""
        with gr.Blocks(analytics_enabled=False, title=f"vlm: {self.task}") as blocks:
            gr.HTML(f"<h1>{escape(self.task)}</h1><p>{escape(self.name)}</p>", elem_classes="v-head")
            with gr.Row():
                with gr.Column(scale=2, min_width=300):
                    photos = [self._drop(place) for place in range(self.form.photos)]
                    texts = [self._field(name, label) for name, label in self.form.texts.items()]
                    languages = self._languages() if self.form.languages else []
                    options = [_component(name, one) for name, one in self.form.options.items()]
                    ways = self._ways() if self.form.ways else []
                    with gr.Row():
                        button = gr.Button("Run", variant="primary", min_width=100)
                        stop = gr.Button("Stop", visible=self.form.streams, min_width=100)
                with gr.Column(scale=3, min_width=300):
                    shown = gr.HTML(html.hint("The result stands here."), elem_id="result", js_on_load=None)
            about: Any = {"label": "Examples of the run", "type": "index", "visible": bool(self.rows)}
            rows = gr.Dataset(components=texts, samples=self.rows, **about)
            asked: Any = {
                "inputs": [*photos, *texts, *languages, *options, *ways],
                "outputs": shown,
                "api_visibility": "private",
                **MODEL,
            }
            triggers = [button.click, *(photo.upload for photo in photos)]
            triggers += [option.change for option in [*languages, *ways[:1]]] if photos else []
            triggers += [text.submit for text in texts if text.lines == 1]
            events = [gr.on(triggers, self.answer, **asked, trigger_mode="always_last")]
            filled = rows.click(self._row, rows, texts, api_visibility="private") if texts else None
            events += [filled.then(self.answer, **asked)] if filled else []
            for event in events:
                event.then(None, js=SHOW)
            stop.click(None, cancels=events, api_visibility="private")
            if self.talk is not None:
                self.talk.blocks(photos, **MODEL)
        return blocks

    def _row(self, place: int) -> Any:
        """Returns the texts of an example."""
        return self.rows[place] if len(self.rows[place]) > 1 else self.rows[place][0]

    def _drop(self, place: int) -> gr.HTML:
        """Builds a field for dropping a photo, with the gallery below it."""
        label = "Drop a photo here, paste one, or tap to choose" if self.form.photos == 1 else f"Photo {place + 1}"
        examples = [thumbnail(image, 192) for image in self.images.values()]
        template, script = ((HERE / f"demo_photo.{kind}").read_text(encoding="utf-8") for kind in ("html", "js"))
        options: Any = {"examples": examples, "most": self.max_bytes, "pastes": place == 0}
        options |= {"html_template": template, "js_on_load": script, "apply_default_css": False}
        return gr.HTML("", label=label, elem_classes="v-photo-in", **options)

    def _field(self, name: str, label: str) -> gr.Textbox:
        value = self.rows[0][list(self.form.texts).index(name)] if self.rows else ""
        lines = {"question": 1, "prompt": 1, "label": 5}.get(name, 3)
        return gr.Textbox(value, label=label, lines=lines, max_length=MAX_TEXT)

    def _languages(self) -> list[Any]:
        """Builds the choice of language; the first is the default."""
        return [gr.Radio(list(self.form.languages), value=self.form.languages[0], label="Language")]

    def _range(self, name: str) -> tuple[Any, Any]:
        """Returns the least and the greatest value of a slider; the checkpoint's own value is in its range."""
        (least, most, *_), default = BOUNDS[name], getattr(self.form.defaults, name)
        return min(least, default), max(most, default)

    def _bounded(self, name: str, value: Any) -> Any:
        """Returns the value sent for an option, limited to the slider's range."""
        least, most = self._range(name)
        value = value if isinstance(value, int | float) else least
        return type(getattr(Values, name))(min(max(least, value), most))

    def _ways(self) -> list[Any]:
        """Builds the choice of decoding and its options, in the order of `Values`."""
        defaults = self.form.defaults
        way = gr.Radio(list(self.form.ways), value=defaults.way, label="Way of writing")
        with gr.Accordion("Options", open=False):
            sliders = [
                gr.Slider(*self._range(name), getattr(defaults, name), step=step, label=label)
                for name, (_, _, step, label) in BOUNDS.items()
            ]
        sliders[0].visible, sliders[-1].visible = "beams" in self.form.ways, self.form.streams
        return [way, *sliders]


def _component(name: str, field: Field) -> Any:
    """Builds the component of an option."""
    label, about = name.replace("_", " ").capitalize(), {"value": field.value, "info": field.help}
    if field.kind is bool:
        return gr.Checkbox(label=label, **about)
    if field.kind is int:
        return gr.Number(label=label, precision=0, **about)
    return gr.Textbox(label=label, max_length=MAX_TEXT, **about)


def _typed(field: Field, value: Any) -> Any:
    """Returns the value sent for an option, or its initial one if the type is wrong."""
    if field.kind is int and isinstance(value, float) and value.is_integer():
        return int(value)
    return value if type(value) is field.kind else field.value


def _known(value: Any, offered: Sequence[str]) -> str | None:
    """Returns a choice if the page offers it, else None."""
    return value if value in offered else None


def mounted(page: Page, *, queue: int) -> FastAPI:
    """Returns the page as an application, to be put behind `Guard`.

    Args:
        queue: Requests that may wait.
    """
    blocks = page.blocks().queue(max_size=queue, default_concurrency_limit=1, api_open=False)
    blocks.state_session_capacity = SESSIONS
    theme = gr.themes.Default(font=FONTS, font_mono=MONO)
    css = (HERE / "demo.css").read_text(encoding="utf-8")
    options: Any = {"allowed_paths": [], "footer_links": [], "run_history": False, "enable_monitoring": False}
    options |= {"blocked_paths": ["/"], "show_error": False, "max_file_size": 1, "ssr_mode": False, "pwa": False}
    return gr.mount_gradio_app(FastAPI(openapi_url=None), blocks, "", theme=theme, css=css, **options)
