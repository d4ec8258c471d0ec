"""The page of `vlm demo`, built with Gradio: a form, its results, and a conversation."""

import base64
import json
import re
import traceback
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import gradio as gr
from fastapi import FastAPI
from PIL import Image

from vlm.data.images.image import SUFFIXES, ImageError, load_image
from vlm.data.text.words import split_lines
from vlm.decoding.continuation import PromptCache
from vlm.errors import UserError
from vlm.inference.arguments import GAP
from vlm.inference.command_options import AnswerOptions
from vlm.io.page import escape, thumbnail
from vlm.serving import demo_forms as html
from vlm.serving.demo_forms import Form, FormOption, Values
from vlm.tasks.chat.predictor import ChatPredictor
from vlm.tasks.chat.session import Chat
from vlm.untrusted.sizes import JsonValue

MAX_EXAMPLES = 8  # maximum number of example images, and of example texts
MAX_RECORDS_BYTES = 2**22
# Keys of sample records, by field of the form.
FIELDS = {"text": ("prompt", "text", "context", "words"), "label": ("caption",)}


def find_samples_folder(checkpoint: Path) -> Path:
    """Returns the samples folder of a run, given its checkpoint or its folder."""
    folder = checkpoint if checkpoint.is_dir() else checkpoint.parent
    return (folder.parent if folder.name == "checkpoints" else folder) / "samples"


def example_images(samples: Path) -> list[Image.Image]:
    """Returns the readable images of a folder."""
    paths = sorted(path for path in samples.glob("*") if path.suffix.lower() in SUFFIXES) if samples.is_dir() else []
    images: list[Image.Image] = []
    for path in paths[:MAX_EXAMPLES]:
        try:
            images.append(load_image(path))
        except ImageError:  # shown without this example
            continue
    return images


def example_texts(samples: Path, fields: Sequence[str]) -> list[list[str]]:
    """Returns example texts from the newest samples: a row for each sample that has all fields of a form.

    Args:
        fields: Names of the fields.
    """
    steps = {path: int(re.findall(r"\d+", f"{path.stem} 0")[0]) for path in samples.glob("step_*.jsonl") if fields}
    paths = sorted(steps, key=steps.__getitem__)
    if not paths or paths[-1].stat().st_size > MAX_RECORDS_BYTES:
        return []
    try:
        records = [json.loads(line) for line in split_lines(paths[-1].read_text(encoding="utf-8"))]
    except (OSError, ValueError):
        return []
    records = [record for record in records if isinstance(record, dict)]
    rows = []
    for record in records:
        row = []
        for name in fields:
            value = next((record[key] for key in FIELDS.get(name, (name,)) if key in record), "")
            text = " ".join(map(str, value)) if isinstance(value, list) else str(value)
            if record.get("gaps") and record.get("true"):  # a text with masked words
                text = text.replace(str(record["true"][0]).strip("\u2581"), GAP, 1)
            row.append(text)
        rows.append(row)
    if list(fields) == ["label"]:  # the captions of all samples are the candidates
        rows = [["\n".join(dict.fromkeys(row[0] for row in rows[:MAX_EXAMPLES] if row[0]))]]
    return [row for row in rows if all(row)][:MAX_EXAMPLES]


MAX_TEXT = 20_000  # characters of a message
MAX_TEMPERATURE = 2.0  # maximum of the temperature slider
HINT = "The conversation appears here."


class ChatPanel:
    """The conversation panel of a page. Gradio stores the state of each session; all share the KV cache.

    Args:
        predictor: The model.
        photo: Opens a photo of the form, given the field's value and its index.
    """

    def __init__(self, predictor: ChatPredictor, photo: Callable[[str, int], Image.Image]) -> None:
        self.predictor, self.photo, self.cache = predictor, photo, PromptCache(predictor.decoder)
        sampling, *_ = predictor.plan_decoding(AnswerOptions())
        self.temperature = sampling.temperature  # that of `vlm chat` without options
        self.max_temperature = max(MAX_TEMPERATURE, self.temperature)

    def answer(self, *inputs: Any) -> Iterator[tuple[str, Any, str]]:
        """Yields the conversation so far as HTML, the session state, and the text of the input field.

        Args:
            inputs: The photo, if the model reads one; the message; the temperature; the session state.
        """
        *sources, words, temperature, state = inputs
        chat, attached = state or (None, "")
        try:
            if not isinstance(temperature, int | float):
                temperature = self.temperature
            temperature = min(max(float(temperature), 0.0), self.max_temperature)
            options = AnswerOptions(sample=True, temperature=temperature)
            chat = chat or Chat(self.predictor, options, forget=True, cache=self.cache)
            chat.options = options
            source = str(sources[0] or "") if sources else ""
            if source and source != attached:
                chat.show(self.photo(source, 1))
                attached = source
            text = str(words or "").strip()
            if not 0 < len(text) <= MAX_TEXT:
                raise UserError(f"your message: has {len(text):,} characters; write 1 to {MAX_TEXT:,}")
            text.encode()
            for _ in chat.stream(text):
                yield conversation_html(chat), (chat, attached), ""
            yield conversation_html(chat), (chat, attached), ""
        except UserError as fault:
            yield conversation_html(chat) + html.render_error(str(fault)), (chat, attached), str(words or "")
        except UnicodeEncodeError:
            yield conversation_html(chat) + html.render_error("your message: is not UTF-8"), (chat, attached), ""
        except Exception:  # the model failed
            traceback.print_exc()
            yield conversation_html(chat) + html.render_error("the model failed; its log says why"), None, ""

    def add_blocks(self, photos: Sequence[gr.HTML], **model: Any) -> None:
        """Adds the conversation below a form, with the photos of the form.

        Args:
            model: Gradio's options of functions that run the model.
        """
        gr.HTML("<h2>Conversation</h2>", elem_classes="v-head")
        with gr.Row():
            with gr.Column(scale=2, min_width=300):
                words = gr.Textbox(label="Message (with the photo above, if there is one)" if photos else "Message")
                label = "Temperature of the conversation"
                temperature = gr.Slider(0.0, self.max_temperature, self.temperature, step=0.05, label=label)
                with gr.Row():
                    button = gr.Button("Send", variant="primary", min_width=100)
                    stop = gr.Button("Stop", min_width=100)
                    restart = gr.Button("New conversation", min_width=100)
            with gr.Column(scale=3, min_width=300):
                conversation = gr.HTML(html.render_hint(HINT), js_on_load=None)
        state = gr.State(None)
        inputs, outputs = [*photos, words, temperature, state], [conversation, state, words]
        triggers = [button.click, words.submit]
        event = gr.on(triggers, self.answer, inputs, outputs, api_visibility="private", **model)
        stop.click(None, cancels=[event], api_visibility="private")
        restart.click(
            lambda: (html.render_hint(HINT), None, ""), None, outputs, cancels=[event], api_visibility="private"
        )


def conversation_html(chat: Chat | None) -> str:
    """Returns a conversation as HTML."""
    turns = [] if chat is None else chat.turns
    names = {"user": "You", "assistant": "Model"}
    lines = (f"<p><b>{names[turn.role]}</b> {escape(turn.text)}</p>" for turn in turns)
    return f'<div class="v-flow" aria-live="polite">{"".join(lines)}</div>'


HERE = Path(__file__).parent
SESSIONS = 16  # maximum number of sessions whose state Gradio stores
# Fields of `Values` in order, with minimum, maximum, step and label of their sliders.
SLIDERS = {
    "count": (2, 8, 1, "Number of beams or samples"),
    "temperature": (0.05, 2.0, 0.05, "Sampling temperature"),
    "seed": (0, 99, 1, "Random seed"),
    "tokens": (16, 512, 16, "Maximum number of tokens"),
}
MODEL: dict[str, Any] = {"concurrency_id": "model", "concurrency_limit": 1}  # one request at a time
SCROLL_SCRIPT = """() => {
  const result = document.getElementById('result');
  if (result.getBoundingClientRect().top > innerHeight / 2) result.scrollIntoView({behavior: 'smooth'});
}"""  # on a phone the result is below the form
FONTS = ["system-ui", "-apple-system", "Segoe UI", "Roboto", "DejaVu Sans", "sans-serif"]
MONO = ["ui-monospace", "Menlo", "Consolas", "DejaVu Sans Mono", "monospace"]


class Page:
    """The page of a model.

    Args:
        task: The task's name.
        name: The checkpoint's name.
        form: The model's form.
        samples: The samples folder of the run.
        max_bytes: Maximum size of a photo.
        chat: The predictor for conversations, if the model supports them.
    """

    def __init__(
        self, *, task: str, name: str, form: Form, samples: Path, max_bytes: int, chat: ChatPredictor | None = None
    ) -> None:
        self.task, self.name, self.form, self.max_bytes = task.replace("_", " "), name, form, max_bytes
        self.chat_panel = None if chat is None else ChatPanel(chat, self.open_photo)
        images = example_images(samples) if form.photos else []
        self.images = {str(place): image for place, image in enumerate(images)}
        self.rows = example_texts(samples, list(form.texts))

    def answer(self, *inputs: JsonValue) -> Iterator[str]:
        """Yields the answer to the form as HTML, or an error message for an invalid value."""
        if self.form.photos and not any(inputs[: self.form.photos]):  # an option may change before a photo is chosen
            yield html.render_hint("Drop a photo, or choose an example.")
            return
        try:
            yield from self.form.answer(self.read_values(inputs))
        except UserError as fault:
            yield html.render_error(str(fault))
        except Exception:  # the model failed: the inputs are valid
            traceback.print_exc()
            yield html.render_error("the model failed; its log says why")

    def read_values(self, inputs: Sequence[JsonValue]) -> Values:
        """Reads the values of the form.

        Raises:
            UserError: A value is invalid.
        """
        remaining = iter(inputs)
        sources = [str(next(remaining) or "") for _ in range(self.form.photos)]
        photos = [self.open_photo(source, place) for place, source in enumerate(sources, start=1) if source]
        texts = {name: self.check_text(name, str(next(remaining) or "")) for name in self.form.texts}
        language = _offered_or_none(next(remaining), self.form.languages) if self.form.languages else None
        options: dict[str, Any] = {}
        for name, option in self.form.options.items():
            value = next(remaining)
            if option.kind is int and isinstance(value, float) and value.is_integer():
                value = int(value)
            options[name] = value if type(value) is option.kind else option.value
        options |= {} if language is None else {"language": language}
        way = _offered_or_none(next(remaining, None), self.form.modes) or self.form.defaults.mode
        bounded = {}
        for name, value in zip(SLIDERS, remaining, strict=False):
            least, most = self._slider_range(name)
            value = value if isinstance(value, int | float) else least
            bounded[name] = type(getattr(Values, name))(min(max(least, value), most))
        return Values(photos, texts, options, way, **bounded)

    def open_photo(self, source: str, place: int) -> Image.Image:
        """Opens a photo of the form: an example by its number, or a file's bytes in base64."""
        kind, _, content = source.partition(":")
        name = f"photo {place}" if self.form.photos > 1 else "photo"
        if kind == "example" and content in self.images:
            return self.images[content]
        if kind == "large":
            raise UserError(f"{name}: is too large; the maximum is {self.max_bytes:,} bytes")
        try:
            return load_image(base64.b64decode(content.partition(",")[2], validate=True))
        except ValueError as fault:
            raise UserError(f"{name}: is incomplete; try again") from fault
        except ImageError as fault:
            raise UserError(str(fault).replace("<bytes>", name, 1)) from fault

    def check_text(self, name: str, text: str) -> str:
        label = self.form.texts[name]
        if len(text) > MAX_TEXT:
            raise UserError(f"{label}: has {len(text):,} characters; the maximum is {MAX_TEXT:,}")
        if not text.strip() and name not in self.form.optional:
            raise UserError(f"{label}: is empty; enter a text")
        try:
            text.encode()
        except UnicodeEncodeError as fault:
            raise UserError(f"{label}: is not UTF-8") from fault
        return text

    def build_blocks(self) -> gr.Blocks:
        """Builds the page."""
        with gr.Blocks(analytics_enabled=False, title=f"vlm: {self.task}") as blocks:
            gr.HTML(f"<h1>{escape(self.task)}</h1><p>{escape(self.name)}</p>", elem_classes="v-head")
            with gr.Row():
                with gr.Column(scale=2, min_width=300):
                    photos = [self._build_photo_field(place) for place in range(self.form.photos)]
                    texts = []
                    for place, (name, label) in enumerate(self.form.texts.items()):
                        lines = {"question": 1, "prompt": 1, "label": 5}.get(name, 3)
                        example = self.rows[0][place] if self.rows else ""
                        texts.append(gr.Textbox(example, label=label, lines=lines, max_length=MAX_TEXT))
                    languages = []
                    if choices := list(self.form.languages):
                        languages = [gr.Radio(choices, value=choices[0], label="Language")]
                    options = [_build_component(name, option) for name, option in self.form.options.items()]
                    ways = self._build_decoding_fields() if self.form.modes else []
                    with gr.Row():
                        button = gr.Button("Run", variant="primary", min_width=100)
                        stop = gr.Button("Stop", visible=self.form.is_streamed, min_width=100)
                with gr.Column(scale=3, min_width=300):
                    result = gr.HTML(html.render_hint("The result appears here."), elem_id="result", js_on_load=None)
            rows = gr.Dataset(
                label="Examples of the run", components=texts, samples=self.rows, type="index", visible=bool(self.rows)
            )
            event_options: dict[str, Any] = {
                "inputs": [*photos, *texts, *languages, *options, *ways],
                "outputs": result,
                "api_visibility": "private",
                **MODEL,
            }
            triggers = [button.click, *(photo.upload for photo in photos)]
            triggers += [option.change for option in [*languages, *ways[:1]]] if photos else []
            triggers += [text.submit for text in texts if text.lines == 1]
            events = [gr.on(triggers, self.answer, **event_options, trigger_mode="always_last")]
            if texts:
                examples = [row if len(row) > 1 else row[0] for row in self.rows]
                filled = rows.click(examples.__getitem__, rows, texts, api_visibility="private")
                events.append(filled.then(self.answer, **event_options))
            for event in events:
                event.then(None, js=SCROLL_SCRIPT)
            stop.click(None, cancels=events, api_visibility="private")
            if self.chat_panel is not None:
                self.chat_panel.add_blocks(photos, **MODEL)
        return blocks

    def _build_photo_field(self, place: int) -> gr.HTML:
        """Builds a field for dropping a photo, with the gallery below it."""
        template, script = ((HERE / f"demo_photo.{kind}").read_text(encoding="utf-8") for kind in ("html", "js"))
        return gr.HTML(
            "",
            label="Drop a photo here, paste one, or tap to choose" if self.form.photos == 1 else f"Photo {place + 1}",
            elem_classes="v-photo-in",
            html_template=template,
            js_on_load=script,
            apply_default_css=False,
            examples=[thumbnail(image, 192) for image in self.images.values()],
            most=self.max_bytes,
            pastes=place == 0,
        )

    def _slider_range(self, name: str) -> tuple[float, float]:
        """Returns the minimum and maximum of a slider, extended to contain the checkpoint's default."""
        (least, most, *_), default = SLIDERS[name], getattr(self.form.defaults, name)
        return min(least, default), max(most, default)

    def _build_decoding_fields(self) -> list[Any]:
        """Builds the fields for the decoding mode and its options, in the order of `Values`."""
        defaults = self.form.defaults
        way = gr.Radio(list(self.form.modes), value=defaults.mode, label="Decoding")
        with gr.Accordion("Options", open=False):
            sliders = [
                gr.Slider(*self._slider_range(name), getattr(defaults, name), step=step, label=label)
                for name, (_, _, step, label) in SLIDERS.items()
            ]
        sliders[0].visible, sliders[-1].visible = "beams" in self.form.modes, self.form.is_streamed
        return [way, *sliders]


def _build_component(name: str, field: FormOption) -> gr.components.Component:
    """Builds the component of an option."""
    about: dict[str, Any] = {"label": name.replace("_", " ").capitalize(), "value": field.value, "info": field.help}
    if field.kind is bool:
        return gr.Checkbox(**about)
    return gr.Number(precision=0, **about) if field.kind is int else gr.Textbox(max_length=MAX_TEXT, **about)


def _offered_or_none(value: JsonValue, offered: Sequence[str]) -> str | None:
    """Returns the value that a client sent for a choice if the page offers it, else None."""
    return value if isinstance(value, str) and value in offered else None


def mount_page(page: Page, *, queue: int) -> FastAPI:
    """Returns the page as an application, to be wrapped in `Guard`.

    Args:
        queue: Maximum number of queued requests.
    """
    blocks = page.build_blocks().queue(max_size=queue, default_concurrency_limit=1, api_open=False)
    blocks.state_session_capacity = SESSIONS
    theme = gr.themes.Default(font=FONTS, font_mono=MONO)
    css = (HERE / "demo.css").read_text(encoding="utf-8")
    options: Any = {"allowed_paths": [], "footer_links": [], "run_history": False, "enable_monitoring": False}
    options |= {"blocked_paths": ["/"], "show_error": False, "max_file_size": 1, "ssr_mode": False, "pwa": False}
    return gr.mount_gradio_app(FastAPI(openapi_url=None), blocks, "", theme=theme, css=css, **options)
