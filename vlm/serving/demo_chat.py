"""A conversation on the page of `vlm demo`, about the photo there or in words only."""

import traceback
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import gradio as gr
from PIL import Image

from vlm.decoding.kept import KeptText
from vlm.errors import UserError
from vlm.inference.command_options import AnswerOptions
from vlm.inference.predictor import Predictor
from vlm.inference.tasks import resolve, tasks_of
from vlm.io.page import escape
from vlm.serving import demo_html as html
from vlm.tasks.chat.predictor import ChatPredictor
from vlm.tasks.chat.session import Chat

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
