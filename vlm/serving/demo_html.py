"""Results as HTML for `vlm demo`, without scripts: CSS lights the photo."""

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, is_dataclass
from io import BytesIO
from math import exp
from typing import Any

import numpy as np
from PIL import Image

from vlm.errors import printable
from vlm.inference.ranking import Classes
from vlm.io.page import data_uri, escape
from vlm.tasks.language_modeling.predict import Continuation
from vlm.tasks.masked_language_modeling.predict import Filled
from vlm.tasks.span_answering.predict import SpanAnswer as Span
from vlm.tasks.tagging.predict import Tagged

LIT = 48  # pixels of an overlay's side; the browser scales it to the photo
WARM = (255, 190, 80)
HUES = 6  # number of colours of tags in the style sheet
END = "\u220e"
OUTSIDE = ("O", "_", "other")  # tags of words outside all classes


@dataclass
class Written:
    """A generated text to show.

    Args:
        logprob: Log-probability in nats.
        confidence: The geometric mean of its tokens' probabilities.
        words: Its words with their probabilities.
        lights: The attention map (rows, columns) of each word; empty if the model offers none.
    """

    logprob: float
    confidence: float
    words: Sequence[tuple[str, float]]
    lights: Sequence[np.ndarray] = ()


def refusal(line: str) -> str:
    """Returns the message for an input that cannot be used."""
    return f'<p class="v-refusal" role="alert">{escape(printable(line))}</p>'


def hint(line: str) -> str:
    return f'<p class="v-soft">{escape(line)}</p>'


def written(texts: Sequence[Written], photo: str | None = None, alt: str = "") -> str:
    """Returns texts as words with probability bars, below the photo, which lights up for the word under the pointer.

    Args:
        photo: The image as the model sees it, as a data URI; None for a model of texts.
        alt: Its alternative text.
    """
    parts, rules = [], []
    for rank, text in enumerate(texts):
        words = [_word(f"{rank}-{place}", *word) for place, word in enumerate(text.words)]
        score = f"confidence {text.confidence:.1%}, log-probability {text.logprob:.2f}"
        parts.append(f'<p class="v-text">{"".join(words) or "<i>(empty)</i>"}<small>{score}</small></p>')
        rules += [f"{rank}-{place}" for place in range(len(text.lights))]
    if photo is None:
        return "".join(parts)
    lights = [
        f'<img class="v-light" data-n="{rank}-{place}" src="{light(weights)}" alt="">'
        for rank, text in enumerate(texts)
        for place, weights in enumerate(text.lights)
    ]
    image = f'<img src="{photo}" alt="{escape(alt, quote=True)}">'
    style = f"<style>{''.join(map(_lit_by, rules))}</style>"
    note = hint("Point at a word, or tap it: the photo is bright where the model looked.") if rules else ""
    return (
        f'<div class="v-looks">{style}<div class="v-photo">{image}{"".join(lights)}</div>{note}{"".join(parts)}</div>'
    )


def _word(name: str, word: str, probability: float) -> str:
    label = f"{escape(word, quote=True)}, {probability:.0%}"
    bar = f'<i style="width:{probability:.0%}"></i>'
    shown = f"<b>{escape(word)}</b>{bar}"
    return f'<span class="v-word" tabindex="0" data-n="{name}" title="{label}" aria-label="{label}">{shown}</span>'


def _lit_by(name: str) -> str:
    """Returns the CSS rule by which a word lights the photo, if it is under the pointer, or else has the focus."""
    word, lit = f'.v-word[data-n="{name}"]', f'.v-light[data-n="{name}"]{{opacity:1}}'
    over, at = f".v-looks:has({word}:hover) {lit}", f".v-looks:not(:has(.v-word:hover)):has({word}:focus) {lit}"
    return over + at


def light(weights: np.ndarray) -> str:
    """Returns an overlay for a photo: dark where weights are small, warm light where they are large."""
    grey = Image.fromarray((255 * weights / max(float(weights.max()), 1e-12)).astype(np.uint8))
    heat = np.asarray(grey.resize((LIT, LIT), Image.Resampling.BICUBIC), dtype=float)[..., None] / 255
    layer = np.concatenate([heat * WARM, 255 * (0.78 * (1 - heat) + 0.25 * heat)], axis=-1)
    return as_png(Image.fromarray(layer.astype(np.uint8), "RGBA"))


def as_png(image: Image.Image) -> str:
    file = BytesIO()
    image.save(file, "PNG")
    return data_uri(file.getvalue(), "png")


def tree(nodes: Iterable[Mapping[str, Any]], *, end: str) -> str:
    """Returns the hypotheses of a beam search as nested lists.

    Args:
        nodes: As from `vlm.decoding.trace.as_json`.
        end: The token that ends a text.
    """
    after: dict[Any, list[Mapping[str, Any]]] = defaultdict(list)
    for node in nodes:
        if node["kept"]:
            after[node["parent"]].append(node)

    def branches(parent: Any) -> str:
        return "".join(map(branch, sorted(after[parent], key=lambda node: -node["total"])))

    def branch(node: Mapping[str, Any]) -> str:
        pieces = [node["token"]]
        while len(after[node["id"]]) == 1:
            (node,) = after[node["id"]]
            pieces.append(node["token"])
        below, ended = branches(node["id"]), pieces[-1] == end
        text = escape("".join(pieces[:-1] if ended else pieces).replace("\u2581", " ").strip()) + f" {END}" * ended
        kind = "" if below or ended else ' class="v-dead"'
        return f"<li{kind}>{text} <small>{node['total']:.2f}</small>{f'<ul>{below}</ul>' if below else ''}</li>"

    title = f"The search as a tree: {END} ends a text, the others were left"
    return f'<details class="v-tree"><summary>{title}</summary><ul>{branches(None)}</ul></details>'


def bars(shares: Iterable[tuple[str, float]]) -> str:
    """Returns names with their probabilities as bars."""
    rows = (
        f"<li><span>{escape(name)}</span><span>{share:.1%}</span><i style='width:{share:.1%}'></i></li>"
        for name, share in shares
    )
    return f'<ul class="v-bars">{"".join(rows)}</ul>'


def flowing(prompt: str, text: str) -> str:
    """Returns a prompt and its continuation."""
    return f'<div class="v-flow" aria-live="polite"><span class="v-soft">{escape(prompt)}</span>{escape(text)}</div>'


def tagged(words: Sequence[Tagged]) -> str:
    """Returns words above their tags, with a colour for each tag."""
    kinds = sorted({word.tag for word in words} - {*OUTSIDE})
    parts = []
    for word in words:
        hue = f" v-hue{kinds.index(word.tag) % HUES}" if word.tag in kinds else ""
        title = f"{escape(word.tag, quote=True)}, {word.probability:.0%}"
        small = f"<small>{escape(word.tag)}</small>"
        parts.append(f'<span class="v-tag{hue}" title="{title}">{escape(word.word)}{small}</span>')
    return f'<p class="v-tags">{"".join(parts)}</p>'


def span(answer: Span, text: str) -> str:
    """Returns an answer and the text in which it is marked."""
    chance = f"<small>{answer.probability:.1%}</small>"
    if not answer.text:
        return f'<p class="v-big">The text has no answer. {chance}</p>'
    start, stop = answer.start, answer.start + len(answer.text)
    marked = f"{escape(text[:start])}<mark>{escape(text[start:stop])}</mark>{escape(text[stop:])}"
    return f'<p class="v-big">{escape(answer.text)} {chance}</p><div class="v-flow">{marked}</div>'


def result(value: Any, text: str = "") -> str:
    """Returns a result of any task as HTML.

    Args:
        text: The input, if it was a text.
    """
    if isinstance(value, Classes):
        return bars(value.top)
    if isinstance(value, Span):
        return span(value, text)
    if isinstance(value, Filled):
        gaps = (f"<h4>gap {number}</h4>{bars(gap.items())}" for number, gap in enumerate(value.gaps, start=1))
        return f'<p class="v-big">{escape(value.text)}</p>{"".join(gaps)}'
    if isinstance(value, Continuation):
        return flowing(value.prompt, value.text)
    if isinstance(value, list) and all(isinstance(one, Tagged) for one in value):
        return tagged(value)
    if isinstance(value, np.ndarray):
        return f'<p class="v-text">{escape(" ".join(value.astype(str)))}</p>'
    if hasattr(value, "text") and hasattr(value, "logprob"):
        chance = f"probability {exp(value.logprob):.1%}, log-probability {value.logprob:.2f}"
        return f'<p class="v-big">{escape(value.text) or "<i>(empty)</i>"} <small>{chance}</small></p>'
    if is_dataclass(value) and not isinstance(value, type):
        value = asdict(value)
    rows = value.items() if isinstance(value, Mapping) else [("", value)]
    return "".join(f'<p class="v-big"><small>{escape(str(name))}</small> {escape(str(one))}</p>' for name, one in rows)
