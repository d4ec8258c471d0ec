"""The page of `vlm demo`, built with Gradio: a form on the left, results on the right."""

import base64
import traceback
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import gradio as gr
from fastapi import FastAPI
from PIL import Image

from vlm.data.images.image import ImageError, load_image
from vlm.errors import UserError
from vlm.io.page import escape, thumbnail
from vlm.serving import demo_html as html
from vlm.serving.demo_chat import Talk
from vlm.serving.demo_examples import example_images, example_texts
from vlm.serving.demo_uses import Field, Form, Values
from vlm.tasks.chat.predictor import ChatPredictor

HERE = Path(__file__).parent
MAX_TEXT = 20_000  # characters of a field
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
