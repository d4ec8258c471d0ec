"""Forms of the page of `vlm demo`: the inputs and options that a model's task declares, and its answers as HTML."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, fields
from functools import partial
from typing import Any, get_type_hints

from PIL import Image

from vlm.data.text.lines import split_lines
from vlm.decoding.sampling import Sampling
from vlm.decoding.trace import as_json
from vlm.inference.attention.maps import read_attention
from vlm.inference.options import DecodingOptions, checked, declared, needed
from vlm.inference.predictor import Predictor
from vlm.inference.text.text_words import word_probabilities
from vlm.inference.use import answers
from vlm.inference.writing import Text, Writer
from vlm.io.page import thumbnail
from vlm.models.context import Context
from vlm.serving import demo_html as html
from vlm.tasks.captioning.predict import Captioner
from vlm.tasks.language_modeling.predict import TextGenerator, stream

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
    yield html.result(answers(predictor, inputs, options)[0], values.texts.get("text", ""))


def _continue(generator: TextGenerator, values: Values) -> Iterator[str]:
    """Yields a prompt's continuation, piece by piece if it is sampled."""
    (prompt,), options = _checked(generator, values, **values.decoding(), max_tokens=values.tokens)
    plan, _ = generator.planned(options)
    if not isinstance(plan, Sampling):
        yield html.result(answers(generator, [prompt], options)[0])
        return
    drawing: Any = {"max_tokens": values.tokens, "seed": values.seed, "sampling": plan}
    for (grown,) in stream(generator.model, generator.tokenizer, [prompt], **drawing):
        yield html.flowing(prompt, generator.tokenizer.decode(grown.tokens).rstrip("\ufffd"))


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
    drawn = (html.tree(as_json(one, piece)["nodes"], end=end) for one in trees.values())
    yield html.written(shown, photo, texts[0].text if texts else "") + "".join(drawn)


def _shown(writer: Writer, source: Any, context: Context, text: Text) -> html.Written:
    words = word_probabilities(writer, context, text.tokens)
    lights = []
    if isinstance(writer, Captioner) and writer.form is None:
        reading = (writer.model, writer.tokenizer, writer.preprocess, source.to(writer.device))
        lights = [weights for _, weights in read_attention(*reading, text.tokens).words]
    return html.Written(text.logprob, text.confidence, words, lights)


def _photo(captioner: Captioner, photo: Image.Image) -> str:
    """Returns a photo as the model sees it, at a higher resolution."""
    view = captioner.preprocess.scaled_to(SHOWN)(photo)
    return thumbnail(Image.fromarray(view.permute(1, 2, 0).numpy()), SHOWN)
