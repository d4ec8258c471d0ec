"""Forms of the page of `vlm demo`, and results as HTML without scripts."""

from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields, is_dataclass
from functools import partial
from io import BytesIO
from math import exp
from typing import Any, get_type_hints

import numpy as np
from PIL import Image

from vlm.data.text.words import split_lines
from vlm.decoding.beam_row import as_json
from vlm.decoding.sampling import Sampling
from vlm.errors import printable
from vlm.inference.attention.maps import read_attention
from vlm.inference.options import DecodingOptions, checked, declared, needed
from vlm.inference.predictor import Predictor
from vlm.inference.ranking import Classes
from vlm.inference.use import answers
from vlm.inference.writing import Text, Writer, word_probabilities
from vlm.io.page import data_uri, escape, thumbnail
from vlm.models.context import Context
from vlm.tasks.captioning.predict import Captioner
from vlm.tasks.language_modeling.predict import Continuation, TextGenerator, stream
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
        nodes: As from `vlm.decoding.beam_row.as_json`.
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


SHOWN = 448  # pixels of the longer side of a photo under attention maps
KINDS = (bool, int, str)
WAYS = ("greedy", "beams", "samples")
LABELS = {
    "question": "Question",
    "pair": "Second text",
    "label": "Texts to choose among, one a line",
    "prompt": "Text around each of them, with {} in its place",
}
LINES = ("label", "prompt")  # fields in which each line is a text
TOP = 10  # classes, and words of a gap, unless the page says otherwise


@dataclass
class Values:
    """Values of a form.

    Args:
        photos: The photos, opened.
        texts: Texts by the name of their field.
        options: Options by their names.
        way: One of WAYS.
        count: Texts of beams or samples.
        tokens: The longest text of a language model.
    """

    photos: Sequence[Image.Image] = ()
    texts: Mapping[str, str] = field(default_factory=dict)
    options: Mapping[str, Any] = field(default_factory=dict)
    way: str = WAYS[0]
    count: int = 4
    temperature: float = 1.0
    seed: int = 0
    tokens: int = 128

    def decoding(self) -> dict[str, Any]:
        """Returns the decoding options for the chosen way of writing."""
        if self.way == "samples":
            return {"sample": True, "temperature": self.temperature, "seed": self.seed}
        return {"sample": False, "beam": max(2, self.count) if self.way == "beams" else 1}


@dataclass(frozen=True)
class Field:
    """An option on the page: its type (bool, int or str), its initial value, and its help."""

    kind: type
    value: Any
    help: str


@dataclass(frozen=True)
class Form:
    """The form of a model.

    Args:
        photos: Number of photos that it reads.
        texts: Labels of the texts that it reads, by the names of their fields.
        ways: The ways in which it writes, if there are several.
        optional: Fields that may be empty.
        answer: Yields the answer to values as HTML, again whenever it has grown.
        languages: The languages in which it writes, if there are several.
        options: Its other options by their names.
        defaults: Values until a visitor changes them.
    """

    photos: int
    texts: Mapping[str, str]
    ways: tuple[str, ...]
    optional: tuple[str, ...]
    answer: Callable[[Values], Iterator[str]]
    languages: tuple[str, ...] = ()
    options: Mapping[str, Field] = field(default_factory=dict)
    defaults: Values = field(default_factory=Values)

    @property
    def streams(self) -> bool:
        """Returns True for an answer that is streamed."""
        return self.ways != WAYS and bool(self.ways)


def form_of(predictor: Predictor) -> Form:
    """Builds the form of a model from its declared options and inputs."""
    kind, main = predictor.options, predictor.arguments.kind
    beside = {name: one for name, one in declared(kind).items() if one.beside}
    photos = getattr(predictor, "images", 1) if main == "image" else int("image" in beside)
    texts = {} if main == "image" else {"text": "Text"}
    texts |= {name: LABELS.get(name, one.help) for name, one in beside.items() if one.beside == "text"}
    if getattr(predictor, "pairs", True) is False:  # a classifier of single texts
        texts.pop("pair")
    optional = tuple(name for name in texts if name in beside and name not in needed(kind))
    tokenizer = getattr(predictor, "tokenizer", None)
    languages = tuple(tokenizer.languages) if tokenizer is not None and "language" in declared(kind) else ()
    options: Any = {"languages": languages if len(languages) > 1 else (), "options": _options(kind)}
    unset = kind(**dict.fromkeys(needed(kind)))
    if isinstance(predictor, TextGenerator):
        plan, chosen = predictor.planned(unset)
        options["defaults"] = _defaults(chosen.beam or 1, plan if isinstance(plan, Sampling) else plan.sampling)
        options["defaults"].tokens = chosen.max_tokens or options["defaults"].tokens
        ways = ("samples", "greedy", *(("beams",) if options["defaults"].way == "beams" else ()))
        return Form(0, texts, ways, ("text",), partial(_continue, predictor), **options)
    if isinstance(predictor, Writer):
        search = predictor.searching(unset)
        options["defaults"] = _defaults(search.beam, search.sampling)
        return Form(photos, texts, WAYS, optional, partial(_write, predictor), **options)
    return Form(photos, texts, (), optional, partial(_use, predictor), **options)


def _defaults(beam: int, sampling: Sampling | None) -> Values:
    """Returns the values for which the page writes what the commands write without options."""
    if sampling is not None and sampling.temperature > 0:
        return Values(way="samples", temperature=sampling.temperature)
    return Values(way="beams", count=beam) if beam > 1 else Values()


def _options(kind: type) -> dict[str, Field]:
    """Returns the options shown unchanged: not those of decoding, of an input's parts, or the language."""
    hints, known = get_type_hints(kind), declared(kind)
    own = (one for one in fields(kind) if not hasattr(DecodingOptions, one.name) and one.name != "language")
    shown = {one.name: one.default for one in own if known[one.name].scope == "anyone" and not known[one.name].beside}
    shown |= {"top": TOP} if "top" in shown else {}
    return {name: Field(hints[name], value, known[name].help) for name, value in shown.items() if hints[name] in KINDS}


def _inputs(values: Values) -> tuple[list[Any], dict[str, Any]]:
    """Returns the inputs of a form, and their other parts by name."""
    beside: dict[str, Any] = {name: text for name, text in values.texts.items() if name != "text" and text.strip()}
    beside |= {name: list(filter(None, map(str.strip, split_lines(beside[name])))) for name in LINES if name in beside}
    if "text" not in values.texts:
        return list(values.photos), beside
    return [values.texts["text"]], beside | ({"image": values.photos[0]} if values.photos else {})


def _checked(predictor: Predictor, values: Values, **options: Any) -> tuple[list[Any], Any]:
    """Returns the inputs of a form, and its checked options."""
    inputs, beside = _inputs(values)
    return inputs, checked(predictor.options, {**values.options, **beside, **options}, use="this page", client=True)


def _use(predictor: Predictor, values: Values) -> Iterator[str]:
    """Yields the result of a model that generates no text."""
    inputs, options = _checked(predictor, values)
    yield result(answers(predictor, inputs, options)[0], values.texts.get("text", ""))


def _continue(generator: TextGenerator, values: Values) -> Iterator[str]:
    """Yields a prompt's continuation, piece by piece if it is sampled."""
    (prompt,), options = _checked(generator, values, **values.decoding(), max_tokens=values.tokens)
    plan, _ = generator.planned(options)
    if not isinstance(plan, Sampling):
        yield result(answers(generator, [prompt], options)[0])
        return
    drawing: Any = {"max_tokens": values.tokens, "seed": values.seed, "sampling": plan}
    for (grown,) in stream(generator.model, generator.tokenizer, [prompt], **drawing):
        yield flowing(prompt, generator.tokenizer.decode(grown.tokens).rstrip("\ufffd"))


def _write(writer: Writer, values: Values) -> Iterator[str]:
    """Yields the texts of a model that reads a photo, a text, or both."""
    results = 1 if values.way == WAYS[0] else max(2, values.count)
    inputs, options = _checked(writer, values, **values.decoding(), results=results)
    (source,) = (writer.prepare(one, options) for one in writer.sources(inputs, options))
    trees: dict[int, Any] = {}
    ((_, texts),) = writer.results([[source]], options, trees=trees if values.way == "beams" else None)
    context = writer.encode([source])
    shown = [_shown(writer, source, context, text) for text in texts]
    photo = _photo(writer, values.photos[0]) if isinstance(writer, Captioner) else None
    piece, end = writer.tokenizer.piece, writer.tokenizer.piece(writer.tokenizer.eos_id)
    drawn = (tree(as_json(one, piece)["nodes"], end=end) for one in trees.values())
    yield written(shown, photo, texts[0].text if texts else "") + "".join(drawn)


def _shown(writer: Writer, source: Any, context: Context, text: Text) -> Written:
    words = word_probabilities(writer, context, text.tokens)
    lights = []
    if isinstance(writer, Captioner) and writer.form is None:
        reading = (writer.model, writer.tokenizer, writer.preprocess, source.to(writer.device))
        lights = [weights for _, weights in read_attention(*reading, text.tokens).words]
    return Written(text.logprob, text.confidence, words, lights)


def _photo(captioner: Captioner, photo: Image.Image) -> str:
    """Returns a photo as the model sees it, at a higher resolution."""
    view = captioner.preprocess.scaled_to(SHOWN)(photo)
    return thumbnail(Image.fromarray(view.permute(1, 2, 0).numpy()), SHOWN)
