"""Forms of the page of `vlm demo`, one for any task: what a model reads, by its predictor, and its answers as HTML."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from PIL import Image

from vlm.data.images.image import Preprocess
from vlm.decoding.sampling import Sampling
from vlm.decoding.trace import as_json
from vlm.inference.attention.maps import read_attention
from vlm.inference.image_predictor import ImagePredictor
from vlm.inference.options import declared
from vlm.inference.predictor import Predictor
from vlm.inference.text.text_words import word_probabilities
from vlm.inference.use import answers
from vlm.inference.writing import Text, Writer
from vlm.io.page import thumbnail
from vlm.models.context import Context
from vlm.serving import demo_html as html
from vlm.tasks.captioning.predict import Captioner
from vlm.tasks.image_questions.predict import ImageQuestionAnswerer
from vlm.tasks.language_modeling.predict import TextGenerator, stream

TOP = 10  # classes, and words of a gap
SHOWN = 448  # pixels of the side of a photo that is lit
WAYS = ("greedy", "beams", "samples")
LABELS = {"question": "Question", "pair": "Second text", "label": "Texts to choose among, one a line"}


@dataclass
class Values:
    """Values of a form.

    Args:
        photos: The photos, opened.
        texts: Texts by the name of their field.
        language: That of the texts, of a model of several.
        way: One of WAYS.
        count: Texts of beams or samples.
        tokens: The longest text of a language model.
    """

    photos: Sequence[Image.Image] = ()
    texts: Mapping[str, str] = field(default_factory=dict)
    language: str | None = None
    way: str = WAYS[0]
    count: int = 4
    temperature: float = 1.0
    seed: int = 0
    tokens: int = 128

    def options(self) -> dict[str, Any]:
        """The options of decoding that the way of writing stands for."""
        if self.way == "samples":
            return {"sample": True, "temperature": self.temperature, "seed": self.seed}
        return {"sample": False, "beam": max(2, self.count) if self.way == "beams" else 1}


@dataclass(frozen=True)
class Form:
    """The form of a model.

    Args:
        photos: Number of photos that it reads.
        texts: Labels of the texts that it reads, by the names of their fields.
        ways: The ways in which it writes, if there are several.
        optional: Fields that may be empty.
        answer: The answer to values as HTML, and again whenever there is more of it.
        languages: The languages in which it writes, if there are several.
    """

    photos: int
    texts: Mapping[str, str]
    ways: tuple[str, ...]
    optional: tuple[str, ...]
    answer: Callable[[Values], Iterator[str]]
    languages: tuple[str, ...] = ()

    @property
    def streams(self) -> bool:
        """True for an answer that comes piece by piece."""
        return self.ways != WAYS and bool(self.ways)


def form_of(predictor: Predictor) -> Form:
    """The form of a model, as the signature of its predictor's `use` has it."""
    parameters = declared(predictor.options)
    beside_photo = "image" in parameters  # a text is the input, and a photo stands beside it
    reads_photo = beside_photo or isinstance(predictor, ImagePredictor)
    texts = {} if reads_photo and not beside_photo else {"text": "Text"}
    texts |= {name: label for name, label in LABELS.items() if name in parameters}
    if getattr(predictor, "pairs", True) is False:
        texts.pop("pair")
    photos = predictor.images if isinstance(predictor, ImageQuestionAnswerer) else int(reads_photo)
    optional = ("pair",) if getattr(predictor, "pairs", True) is None else ()
    if isinstance(predictor, TextGenerator):
        return Form(0, {"text": "Text to go on from"}, ("samples", WAYS[0]), ("text",), partial(_continue, predictor))
    if isinstance(predictor, ImageQuestionAnswerer):
        return Form(photos, texts, (), optional, partial(_answer, predictor))
    if isinstance(predictor, Writer):
        languages = tuple(predictor.tokenizer.languages)
        answer = partial(_write, predictor)
        return Form(photos, texts, WAYS, optional, answer, languages if len(languages) > 1 else ())
    return Form(photos, texts, (), optional, partial(_use, predictor))


def _use(predictor: Predictor, values: Values) -> Iterator[str]:
    """The result of a model that writes no text of its own."""
    parameters, texts = declared(predictor.options), values.texts
    options: dict[str, Any] = {"top": TOP} if "top" in parameters else {}
    options |= {name: texts[name] for name in ("pair", "question") if texts.get(name)}
    if "label" in texts:
        options["label"] = [line.strip() for line in texts["label"].splitlines() if line.strip()]
    inputs = list(values.photos) if values.photos else [texts["text"]]
    yield html.result(answers(predictor, inputs, predictor.options(**options))[0], texts.get("text", ""))


def _answer(answerer: ImageQuestionAnswerer, values: Values) -> Iterator[str]:
    options = answerer.options(question=values.texts["question"])
    yield html.result(answers(answerer, list(values.photos), options)[0])


def _continue(generator: TextGenerator, values: Values) -> Iterator[str]:
    """A prompt's continuation, as it comes where it is written token by token."""
    prompt, options = values.texts["text"], {**values.options(), "max_tokens": values.tokens}
    plan, _ = generator.planned(generator.options(**options))
    if not isinstance(plan, Sampling):
        yield html.result(answers(generator, [prompt], generator.options(**options))[0])
        return
    drawing: Any = {"max_tokens": values.tokens, "seed": values.seed, "sampling": plan}
    for (grown,) in stream(generator.model, generator.tokenizer, [prompt], **drawing):
        yield html.flowing(prompt, generator.tokenizer.decode(grown.tokens).rstrip("\ufffd"))


def _write(writer: Writer, values: Values) -> Iterator[str]:
    """The texts of a model that reads a photo, a text, or both."""
    results = 1 if values.way == WAYS[0] else max(2, values.count)
    own: Any = {} if values.language is None else {"language": values.language}
    search = writer.searching(writer.options(**values.options(), **own, results=results))
    pixels = [writer.pixels(photo) for photo in values.photos] if isinstance(writer, ImagePredictor) else []
    inputs = [*values.texts.values(), *pixels]
    source: Any = tuple(inputs) if len(inputs) > 1 else inputs[0]
    trees: dict[int, Any] = {}
    ((_, texts),) = writer.decoded([[source]], search, rows=1, trees=trees if values.way == "beams" else None)
    context = writer.encode([source])
    shown = [_shown(writer, source, context, text) for text in texts]
    photo = _photo(writer, values.photos[0]) if isinstance(writer, Captioner) else None
    piece, end = writer.tokenizer.piece, writer.tokenizer.piece(writer.tokenizer.eos_id)
    drawn = (html.tree(as_json(one, piece)["nodes"], end=end) for one in trees.values())
    yield html.written(shown, photo, texts[0].text if texts else "") + "".join(drawn)


def _shown(writer: Writer, source: Any, context: Context, text: Text) -> html.Written:
    words = word_probabilities(writer, context, text.tokens)
    lights = []
    if isinstance(writer, Captioner):
        reading = (writer.model, writer.tokenizer, writer.preprocess, source.to(writer.device))
        lights = [weights for _, weights in read_attention(*reading, text.tokens).words]
    return html.Written(text.logprob, text.confidence, words, lights)


def _photo(captioner: Captioner, photo: Image.Image) -> str:
    """A photo as the model sees it, only finer."""
    view = Preprocess(**{**captioner.preprocess.state(), "image_size": SHOWN})(photo)
    return thumbnail(Image.fromarray(view.permute(1, 2, 0).numpy()), SHOWN)
