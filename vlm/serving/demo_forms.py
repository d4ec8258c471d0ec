"""Forms of the `vlm demo` page, and rendering of results as HTML without scripts."""

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
from vlm.decoding.beam_row import NodeRecord, as_json
from vlm.decoding.sampling import Sampling
from vlm.errors import printable
from vlm.inference.attention.maps import read_attention
from vlm.inference.options import (
    DecodingOptions,
    Options,
    SamplingOptions,
    build_options,
    get_options,
    required_fields,
)
from vlm.inference.predictor import Predictor
from vlm.inference.use import predict_answers
from vlm.inference.writing import Writer, word_probabilities
from vlm.io.page import data_uri, escape, thumbnail
from vlm.tasks.captioning.predict import Captioner
from vlm.tasks.classification.predict import Classes
from vlm.tasks.detection.pictures import draw_objects
from vlm.tasks.detection.predict import DetectedObject, ObjectDetector
from vlm.tasks.language_modeling.predict import Continuation, TextGenerator, stream
from vlm.tasks.masked_language_modeling.predict import FilledText
from vlm.tasks.span_answering.predict import SpanAnswer as Span
from vlm.tasks.tagging.predict import TaggedWord
from vlm.tasks.text_to_image.predict import encode_png, enlarge

HEATMAP_SIZE = 48  # pixels of a heatmap's side; the browser scales it to the photo
HEATMAP_COLOR = (255, 190, 80)
HUES = 6  # number of colours of tags in the style sheet
END = "\u220e"
OUTSIDE = ("O", "_", "other")  # tags of words that belong to no class


@dataclass
class ScoredText:
    """A generated text with scores per word.

    Args:
        logprob: Log-probability in nats.
        confidence: The geometric mean of its tokens' probabilities.
        words: The words and their probabilities.
        lights: The attention map (rows, columns) of each word; empty if the model does not offer them.
    """

    logprob: float
    confidence: float
    words: Sequence[tuple[str, float]]
    lights: Sequence[np.ndarray] = ()


def render_error(line: str) -> str:
    """Returns an error message for an input."""
    return f'<p class="v-refusal" role="alert">{escape(printable(line))}</p>'


def render_hint(line: str) -> str:
    return f'<p class="v-soft">{escape(line)}</p>'


def render_texts(texts: Sequence[ScoredText], photo: str | None = None, alt: str = "") -> str:
    """Returns texts as words with probability bars, and the photo, which shows the attention for the selected word.

    Args:
        photo: The image as the model sees it, as a data URI; None for a model of texts.
        alt: Its alternative text.
    """
    parts, rules = [], []
    for rank, text in enumerate(texts):
        words = []
        for place, (word, probability) in enumerate(text.words):
            label = f"{escape(word, quote=True)}, {probability:.0%}"
            about = f'data-n="{rank}-{place}" title="{label}" aria-label="{label}"'
            bar = f'<i style="width:{probability:.0%}"></i>'
            words.append(f'<span class="v-word" tabindex="0" {about}><b>{escape(word)}</b>{bar}</span>')
        score = f"confidence {text.confidence:.1%}, log-probability {text.logprob:.2f}"
        parts.append(f'<p class="v-text">{"".join(words) or "<i>(empty)</i>"}<small>{score}</small></p>')
        for place in range(len(text.lights)):  # shown while the pointer is on the word or, without that, on focus
            word, heatmap = f'.v-word[data-n="{rank}-{place}"]', f'.v-light[data-n="{rank}-{place}"]{{opacity:1}}'
            rules.append(f".v-looks:has({word}:hover) {heatmap}")
            rules.append(f".v-looks:not(:has(.v-word:hover)):has({word}:focus) {heatmap}")
    if photo is None:
        return "".join(parts)
    lights = [
        f'<img class="v-light" data-n="{rank}-{place}" src="{render_heatmap(weights)}" alt="">'
        for rank, text in enumerate(texts)
        for place, weights in enumerate(text.lights)
    ]
    image = f'<img src="{photo}" alt="{escape(alt, quote=True)}">'
    style = f"<style>{''.join(rules)}</style>"
    note = render_hint("Point at a word or tap it: the photo is bright where the model attended.") if rules else ""
    return (
        f'<div class="v-looks">{style}<div class="v-photo">{image}{"".join(lights)}</div>{note}{"".join(parts)}</div>'
    )


def render_heatmap(weights: np.ndarray) -> str:
    """Returns an overlay for a photo as a data URI: dark for small weights, a warm colour for large ones."""
    grey = Image.fromarray((255 * weights / max(float(weights.max()), 1e-12)).astype(np.uint8))
    heat = np.asarray(grey.resize((HEATMAP_SIZE, HEATMAP_SIZE), Image.Resampling.BICUBIC), dtype=float)[..., None] / 255
    layer = np.concatenate([heat * HEATMAP_COLOR, 255 * (0.78 * (1 - heat) + 0.25 * heat)], axis=-1)
    file = BytesIO()
    Image.fromarray(layer.astype(np.uint8), "RGBA").save(file, "PNG")
    return data_uri(file.getvalue(), "png")


def render_beam_tree(nodes: Iterable[NodeRecord], *, end: str) -> str:
    """Returns the hypotheses of a beam search as nested lists.

    Args:
        nodes: The hypotheses, parents first.
        end: The token that ends a text.
    """
    after = defaultdict[int | None, list[NodeRecord]](list)
    for node in nodes:
        if node["kept"]:
            after[node["parent"]].append(node)

    def branches(parent: int | None) -> str:
        parts = []
        for node in sorted(after[parent], key=lambda node: -node["total"]):
            pieces = [node["token"]]
            while len(after[node["id"]]) == 1:
                (node,) = after[node["id"]]
                pieces.append(node["token"])
            below, ended = branches(node["id"]), pieces[-1] == end
            text = escape("".join(pieces[:-1] if ended else pieces).replace("\u2581", " ").strip()) + f" {END}" * ended
            kind, tail = "" if below or ended else ' class="v-dead"', f"<ul>{below}</ul>" if below else ""
            parts.append(f"<li{kind}>{text} <small>{node['total']:.2f}</small>{tail}</li>")
        return "".join(parts)

    title = f"Search tree: {END} marks finished texts; the others were pruned"
    return f'<details class="v-tree"><summary>{title}</summary><ul>{branches(None)}</ul></details>'


def render_objects(photo: Image.Image, objects: Sequence[DetectedObject]) -> str:
    """Returns a photo with the boxes of its objects, and the objects with their scores."""
    names = ", ".join(item.label for item in objects) or "no objects"
    picture = thumbnail(draw_objects(photo, objects, longest=PHOTO_SIZE), PHOTO_SIZE)
    image = f'<img src="{picture}" alt="{escape(names, quote=True)}">'
    return f'<div class="v-photo">{image}</div>' + (
        render_bars((item.label, item.score) for item in objects) if objects else render_hint("No objects found.")
    )


def render_pictures(pictures: Sequence[Image.Image], text: str) -> str:
    """Returns drawn pictures, enlarged if they are small."""
    files = [data_uri(encode_png(enlarge(picture, PICTURE_SIZE)), "png") for picture in pictures]
    parts = [f'<img src="{file}" alt="{escape(text, quote=True)}">' for file in files]
    return f'<div class="v-photo">{"".join(parts)}</div>'


def render_bars(shares: Iterable[tuple[str, float]]) -> str:
    """Returns names with their probabilities as bars."""
    rows = (
        f"<li><span>{escape(name)}</span><span>{share:.1%}</span><i style='width:{share:.1%}'></i></li>"
        for name, share in shares
    )
    return f'<ul class="v-bars">{"".join(rows)}</ul>'


def render_continuation(prompt: str, text: str) -> str:
    """Returns a prompt and its continuation."""
    return f'<div class="v-flow" aria-live="polite"><span class="v-soft">{escape(prompt)}</span>{escape(text)}</div>'


def render_tags(words: Sequence[TaggedWord]) -> str:
    """Returns words above their tags, with a colour for each tag."""
    kinds = sorted({word.tag for word in words} - {*OUTSIDE})
    parts = []
    for word in words:
        hue = f" v-hue{kinds.index(word.tag) % HUES}" if word.tag in kinds else ""
        title = f"{escape(word.tag, quote=True)}, {word.probability:.0%}"
        small = f"<small>{escape(word.tag)}</small>"
        parts.append(f'<span class="v-tag{hue}" title="{title}">{escape(word.word)}{small}</span>')
    return f'<p class="v-tags">{"".join(parts)}</p>'


def render_result(value: Any, text: str = "") -> str:
    """Returns a result of any task as HTML.

    Args:
        text: The input, if it was a text.
    """
    if isinstance(value, Classes):
        return render_bars(value.top)
    if isinstance(value, Span):
        chance = f"<small>{value.probability:.1%}</small>"
        if not value.text:
            return f'<p class="v-big">The text has no answer. {chance}</p>'
        start, stop = value.start, value.start + len(value.text)
        marked = f"{escape(text[:start])}<mark>{escape(text[start:stop])}</mark>{escape(text[stop:])}"
        return f'<p class="v-big">{escape(value.text)} {chance}</p><div class="v-flow">{marked}</div>'
    if isinstance(value, FilledText):
        gaps = (f"<h4>gap {number}</h4>{render_bars(gap.items())}" for number, gap in enumerate(value.gaps, start=1))
        return f'<p class="v-big">{escape(value.text)}</p>{"".join(gaps)}'
    if isinstance(value, Continuation):
        return render_continuation(value.prompt, value.text)
    if isinstance(value, list) and all(isinstance(item, TaggedWord) for item in value):
        return render_tags(value)
    pictures = value if isinstance(value, list) else [value]
    if all(isinstance(item, Image.Image) for item in pictures):
        return render_pictures(pictures, text)
    if isinstance(value, np.ndarray):
        return f'<p class="v-text">{escape(" ".join(value.astype(str)))}</p>'
    if hasattr(value, "text") and hasattr(value, "logprob"):
        chance = f"probability {exp(value.logprob):.1%}, log-probability {value.logprob:.2f}"
        return f'<p class="v-big">{escape(value.text) or "<i>(empty)</i>"} <small>{chance}</small></p>'
    if is_dataclass(value) and not isinstance(value, type):
        value = asdict(value)
    rows = value.items() if isinstance(value, Mapping) else [("", value)]
    return "".join(
        f'<p class="v-big"><small>{escape(str(name))}</small> {escape(str(item))}</p>' for name, item in rows
    )


PICTURE_SIZE = 256  # pixels of the longer side up to which a drawn picture is enlarged
PHOTO_SIZE = 448  # pixels of the longer side of a photo with attention maps
KINDS = (bool, int, str)
DECODING_MODES = ("greedy", "beams", "samples")
LABELS = {
    "question": "Question",
    "find": "Classes to find, separated by semicolons (all if empty)",
    "pair": "Second text",
    "label": "Candidate texts, one per line",
    "prompt": "Prompt template, with {} for the candidate",
}
LINES = ("label", "prompt")  # fields with one text per line
TOP = 10  # default number of classes, and of words per gap


@dataclass
class Values:
    """Values of a form.

    Args:
        photos: The decoded photos.
        texts: Texts by field name.
        options: Options by name.
        mode: One of DECODING_MODES.
        count: Number of beams or samples.
        tokens: Maximum number of tokens of a language model's text.
    """

    photos: Sequence[Image.Image] = ()
    texts: Mapping[str, str] = field(default_factory=dict)
    options: Mapping[str, str | int | bool] = field(default_factory=dict)
    mode: str = DECODING_MODES[0]
    count: int = 4
    temperature: float = 1.0
    seed: int = 0
    tokens: int = 128

    def decoding_options(self) -> dict[str, bool | int | float]:
        """Returns the options for the chosen decoding mode."""
        if self.mode == "samples":
            return {"sample": True, "temperature": self.temperature, "seed": self.seed}
        return {"sample": False, "beam": max(2, self.count) if self.mode == "beams" else 1}


@dataclass(frozen=True)
class FormOption:
    """An option on the page: its type (bool, int or str), its default, and its help."""

    kind: type
    value: str | int | bool
    help: str


@dataclass(frozen=True)
class Form:
    """The form of a model.

    Args:
        photos: Number of input photos.
        texts: Labels of the input texts by field name.
        modes: The decoding modes; empty for a model that does not generate text.
        optional: Names of fields that may be empty.
        answer: Yields the answer as HTML; partial answers first if it is streamed.
        languages: The output languages, if there are several.
        options: Further options by name.
        defaults: Default values of the form.
    """

    photos: int
    texts: Mapping[str, str]
    modes: tuple[str, ...]
    optional: tuple[str, ...]
    answer: Callable[[Values], Iterator[str]]
    languages: tuple[str, ...] = ()
    options: Mapping[str, FormOption] = field(default_factory=dict)
    defaults: Values = field(default_factory=Values)

    @property
    def is_streamed(self) -> bool:
        """Returns True if answers are streamed."""
        return self.modes != DECODING_MODES and bool(self.modes)


def build_form(predictor: Predictor) -> Form:
    """Builds the form of a model from its options and inputs."""
    kind, main = predictor.options, predictor.arguments.kind
    input_parts = {name: option for name, option in get_options(kind).items() if option.input_kind}
    photos = getattr(predictor, "images", 1) if main == "image" else int("image" in input_parts)
    texts = {} if main == "image" else {"text": "Text"}
    texts |= {
        name: LABELS.get(name, option.help) for name, option in input_parts.items() if option.input_kind == "text"
    }
    if getattr(predictor, "pairs", True) is False:  # a classifier of single texts
        texts.pop("pair")
    optional = tuple(name for name in texts if name in input_parts and name not in required_fields(kind))
    tokenizer = getattr(predictor, "tokenizer", None)
    languages = tuple(tokenizer.languages) if tokenizer is not None and "language" in get_options(kind) else ()
    languages = languages if len(languages) > 1 else ()
    unset, options, defaults = kind(**dict.fromkeys(required_fields(kind))), _visible_options(kind), Values()
    modes: tuple[str, ...] = ()
    answer = partial(_predict_result, predictor)
    if isinstance(predictor, TextGenerator):
        plan, chosen = predictor.plan_decoding(unset)
        defaults = _default_values(chosen.beam or 1, plan if isinstance(plan, Sampling) else plan.sampling)
        defaults.tokens = chosen.max_tokens or defaults.tokens
        modes = ("samples", "greedy", *(("beams",) if defaults.mode == "beams" else ()))
        photos, optional, answer = 0, ("text",), partial(_stream_continuation, predictor)
    elif isinstance(predictor, Writer):
        search = predictor.build_decoding(unset)
        defaults = _default_values(search.beam, search.sampling)
        modes, answer = DECODING_MODES, partial(_generate, predictor)
    return Form(photos, texts, modes, optional, answer, languages, options, defaults)


def _default_values(beam: int, sampling: Sampling | None) -> Values:
    """Returns the defaults of the decoding options, which are those of the commands."""
    if sampling is not None and sampling.temperature > 0:
        return Values(mode="samples", temperature=sampling.temperature)
    return Values(mode="beams", count=beam) if beam > 1 else Values()


def _visible_options(kind: type) -> dict[str, FormOption]:
    """Returns the options with a field of their own: all but decoding options, input parts and the language."""
    hints, declared_options = get_type_hints(kind), get_options(kind)
    of_texts = DecodingOptions if issubclass(kind, SamplingOptions) else Options  # the page has fields for these
    task_options = (
        option for option in fields(kind) if not hasattr(of_texts, option.name) and option.name != "language"
    )
    defaults: dict[str, Any] = {
        option.name: option.default
        for option in task_options
        if declared_options[option.name].scope == "anyone" and not declared_options[option.name].input_kind
    }
    defaults |= {"top": TOP} if "top" in defaults else {}
    return {
        name: FormOption(hints[name], value, declared_options[name].help)
        for name, value in defaults.items()
        if hints[name] in KINDS
    }


def _read_form(predictor: Predictor, values: Values, **options: float) -> tuple[list[Any], Any]:
    """Returns the inputs of a form, and its validated options."""
    parts: dict[str, Any] = {name: text for name, text in values.texts.items() if name != "text" and text.strip()}
    parts |= {name: list(filter(None, map(str.strip, split_lines(parts[name])))) for name in LINES if name in parts}
    inputs: list[Any] = list(values.photos)
    if "text" in values.texts:
        inputs = [values.texts["text"]]
        parts |= {"image": values.photos[0]} if values.photos else {}
    given = {**values.options, **parts, **options}
    return inputs, build_options(predictor.options, given, use="this page", client=True)


def _predict_result(predictor: Predictor, values: Values) -> Iterator[str]:
    """Yields the result of a model that generates no text."""
    inputs, options = _read_form(predictor, values)
    (result,) = predict_answers(predictor, inputs, options)
    if isinstance(predictor, ObjectDetector):
        yield render_objects(values.photos[0], result)
    else:
        yield render_result(result, values.texts.get("text", ""))


def _stream_continuation(generator: TextGenerator, values: Values) -> Iterator[str]:
    """Yields the continuation of a prompt, token by token if it is sampled."""
    (prompt,), options = _read_form(generator, values, **values.decoding_options(), max_tokens=values.tokens)
    plan, _ = generator.plan_decoding(options)
    if not isinstance(plan, Sampling):
        yield render_result(predict_answers(generator, [prompt], options)[0])
        return
    for (partial_text,) in stream(
        generator.model, generator.tokenizer, [prompt], max_tokens=values.tokens, seed=values.seed, sampling=plan
    ):
        yield render_continuation(prompt, generator.tokenizer.decode(partial_text.tokens).rstrip("\ufffd"))


def _generate(writer: Writer, values: Values) -> Iterator[str]:
    """Yields the texts that a model generates for a photo, a text, or both."""
    results = 1 if values.mode == DECODING_MODES[0] else max(2, values.count)
    inputs, options = _read_form(writer, values, **values.decoding_options(), results=results)
    (source,) = (writer.prepare(item, options) for item in writer.sources(inputs, options))
    trees: dict[int, Any] = {}
    ((_, texts),) = writer.results([[source]], options, trees=trees if values.mode == "beams" else None)
    context = writer.encode([source])
    scored = list[ScoredText]()
    for text in texts:
        words, lights = word_probabilities(writer, context, text.tokens), list[np.ndarray]()
        if isinstance(writer, Captioner) and writer.form is None:
            reading = (writer.model, writer.tokenizer, writer.preprocess, source.to(writer.device))
            lights = [weights for _, weights in read_attention(*reading, text.tokens).words]
        scored.append(ScoredText(text.logprob, text.confidence, words, lights))
    photo: str | None = None
    if isinstance(writer, Captioner):  # the photo as the model sees it, at a higher resolution
        view = writer.preprocess.scaled_to(PHOTO_SIZE)(values.photos[0])
        photo = thumbnail(Image.fromarray(view.permute(1, 2, 0).numpy()), PHOTO_SIZE)
    piece, end = writer.tokenizer.piece, writer.tokenizer.piece(writer.tokenizer.eos_id)
    rendered_trees = (render_beam_tree(as_json(root, piece)["nodes"], end=end) for root in trees.values())
    yield render_texts(scored, photo, texts[0].text if texts else "") + "".join(rendered_trees)
