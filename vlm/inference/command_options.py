"""Options and arguments of the tasks' commands, from which the command line is made; torch is not imported.

A predictor names its two classes as `options` and `arguments`, and `TASKS` names the same ones for the command line.
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Annotated, Any, Self

from vlm.inference.arguments import GAP
from vlm.inference.options import (
    MAX_TOKENS,
    DecodingOptions,
    ImageOptions,
    Language,
    Option,
    Options,
    Prompt,
    Question,
    SamplingOptions,
    Temperature,
    Top,
    TopK,
    TopP,
    WritingOptions,
)
from vlm.inference.structured import GrammarOptions

if TYPE_CHECKING:
    from vlm.decoding.image_tokens import ImageSampling

MAX_PICTURES = 64  # pictures of a text that are drawn in parallel


@dataclass(kw_only=True)
class CaptionOptions(GrammarOptions, WritingOptions, ImageOptions):
    """Options of captioning."""

    language: Language = None
    prompt: Prompt = None


@dataclass(kw_only=True)
class CaptionFiles:
    """Options of `vlm caption` on the files that it writes, and on shards."""

    attention: Annotated[str | None, Option("Write a picture of the attention for each caption.", metavar="DIR")] = None
    resume: Annotated[bool, Option("Skip images that are already in --out; append the others.", ("--continue",))] = (
        False
    )
    sidecar: Annotated[
        bool, Option("Write each caption to photo.txt next to photo.jpg, unless it exists.", ("--sidecar",))
    ] = False
    overwrite: Annotated[bool, Option("With --sidecar: replace existing files.", ("--overwrite",))] = False
    engine: Annotated[str | None, Option("ray: distribute the shards over a Ray cluster.")] = None


@dataclass(kw_only=True)
class PromptedQuestionOptions(GrammarOptions, WritingOptions, ImageOptions):
    """Options of answering questions about images inside prompts."""

    question: Question
    prompt: Prompt = None


@dataclass(kw_only=True)
class QuestionOptions(GrammarOptions, ImageOptions):
    """Options of answering questions about images."""

    question: Question


@dataclass(kw_only=True)
class DetectionOptions(ImageOptions):
    """Options of detecting objects."""

    find: Annotated[
        str | None,
        Option(
            'Classes to find, such as "red circle; blue cross". By default, all; PaliGemma needs them.',
            input_kind="text",
            metavar="CLASSES",
        ),
    ] = None
    min_score: Annotated[float, Option("Leave out objects with a lower score.", least=0, most=1)] = 0.0
    max_tokens: Annotated[
        int | None,
        Option("Maximum tokens per image. By default as in training, else 256.", least=1, most=MAX_TOKENS),
    ] = None


@dataclass(kw_only=True)
class DetectionFiles:
    """Options of `vlm detect` on the files that it writes."""

    draw: Annotated[str | None, Option("Write a copy of each image with its boxes.", metavar="DIR")] = None


@dataclass(kw_only=True)
class DrawingOptions(Options):
    """Options of drawing pictures; None means the checkpoint's value."""

    results: Annotated[int, Option("Number of pictures per text.", least=1, most=MAX_PICTURES)] = 1
    temperature: Temperature = None
    top_k: TopK = None
    top_p: TopP = None
    guidance: Annotated[
        float | None, Option("Weight of the text in each token; 1 is no guidance. By default the checkpoint's.")
    ] = None
    seed: Annotated[int, Option("Random seed of sampling. The same seed gives the same picture.")] = 0

    def resolve(self, stored: Mapping[str, float]) -> "ImageSampling":
        """Returns how tokens are drawn.

        Args:
            stored: The checkpoint's values by option name.
        Raises:
            UserError: A value is out of range.
        """
        from vlm.decoding.image_tokens import ImageSampling
        from vlm.decoding.sampling import Sampling

        given = {name: value for name, value in vars(self).items() if value is not None}
        chosen: dict[str, Any] = {"temperature": 1.0, "guidance": 1.0, **stored, **given}
        sampling: dict[str, Any] = {name: chosen.get(name) for name in ("temperature", "top_k", "top_p")}
        return ImageSampling(sampling=Sampling(**sampling), guidance=chosen["guidance"], seed=self.seed)


@dataclass(kw_only=True)
class DrawingOutput:
    """Where `vlm draw` writes its pictures, and the format of its lines."""

    out: Annotated[str, Option("Folder of the pictures. Created if missing.", metavar="DIR")]
    form: Annotated[str, Option("text, jsonl or csv.", ("--format",), metavar="FORMAT")] = "text"


@dataclass(kw_only=True)
class ClassOptions(ImageOptions):
    """Options of classifying images."""

    top: Top = 1


@dataclass(kw_only=True)
class LabelOptions(ImageOptions):
    """Options of classifying images among classes that are named."""

    label: Annotated[
        str | list[str] | None,
        Option("A class, for a model trained on captions. Repeatable.", cli_type=list[str], input_kind="text"),
    ] = None
    labels: Annotated[str | None, Option("File of such classes, one per line.", metavar="FILE", scope="command")] = None
    prompt: Annotated[
        str | list[str] | None,
        Option(
            "Prompt template with {} for the class, such as 'a photo of a {}'. Repeatable.",
            cli_type=list[str],
            input_kind="text",
        ),
    ] = None
    top: Top = 1

    def files(self) -> list[str]:
        return [] if self.labels is None else [self.labels]


@dataclass(kw_only=True)
class RetrievalOptions(ImageOptions):
    """Options of ranking images by texts."""

    text: Annotated[
        str | list[str], Option("Text to rank the images by. Repeatable.", cli_type=list[str], input_kind="text")
    ]
    top: Annotated[int, Option("Number of images for each text, most similar first.", least=1)] = 10


@dataclass(kw_only=True)
class TextClassOptions(Options):
    """Options of classifying texts."""

    pair: Annotated[
        str | list[str] | None,
        Option(
            "Second text of each pair, in order. Repeatable.", cli_type=list[str], input_kind="text", metavar="TEXT"
        ),
    ] = None
    top: Top = 1


@dataclass(kw_only=True)
class TaggingOptions(Options):
    """Options of tagging."""

    words: Annotated[bool, Option("Split only at spaces; by default, also before punctuation and n't.")] = False


@dataclass(kw_only=True)
class SpanOptions(Options):
    """Options of answering questions about texts."""

    question: Question


@dataclass(kw_only=True)
class FillOptions(Options):
    """Options of filling in gaps."""

    top: Annotated[int, Option(f"Number of words for each {GAP}, most probable first.", least=1)] = 1


@dataclass(kw_only=True)
class GenerationOptions(GrammarOptions, DecodingOptions, Options):
    """Options of writing text that goes on from prompts."""


@dataclass(kw_only=True)
class PhotoTranslationOptions(WritingOptions, ImageOptions):
    """Options of translating texts with photos."""

    image: Annotated[
        Any,
        Option(
            "Image for each text, in order, or one for all. Repeatable.",
            cli_type=list[str],
            input_kind="image",
            metavar="FILE",
        ),
    ]

    def files(self) -> list[str]:
        return list(self.image)


@dataclass(kw_only=True)
class EmbeddingOptions(ImageOptions):
    """Options of embedding."""

    pooling: Annotated[
        str | None,
        Option(
            "mean or first: the mean of the encoder's states, or the first state. By default as the model was trained."
        ),
    ] = None
    normalize: Annotated[
        bool | None, Option("Scale vectors to length 1. By default as the model was trained.", ("--normalize/--as-is",))
    ] = None


@dataclass(kw_only=True)
class ChatArguments:
    """Options of the beginning of a conversation."""

    images: Annotated[list[str] | None, Option("Images attached to the first user message.", positional=True)] = None
    system: Annotated[str | None, Option("System prompt.")] = None
    forget: Annotated[
        bool,
        Option("When the context window is full, drop the oldest user turn and its answer.", ("--forget",)),
    ] = False


@dataclass(kw_only=True)
class AnswerOptions(GrammarOptions, SamplingOptions):
    """Options of an answer in a conversation."""

    stop: Annotated[list[str] | None, Option("Stop generating at this string. Repeatable.", metavar="TEXT")] = None


@dataclass(kw_only=True)
class ChatOptions(AnswerOptions, Options):
    """Options of the answers of many conversations at the same time, as a service computes them."""

    frequency_penalty: Annotated[
        float, Option("Subtracted from the logit of a token for each time that it was chosen.", least=-2, most=2)
    ] = 0.0
    presence_penalty: Annotated[
        float, Option("Subtracted from the logit of each token that was chosen.", least=-2, most=2)
    ] = 0.0
    logit_bias: Annotated[dict[str, float] | None, Option("Token ids with what is added to their logits.")] = None
    logprobs: Annotated[int | None, Option("Number of most probable tokens to report.", least=0, most=20)] = None

    def without_prompt_parts(self) -> Self:
        """Returns the options without seed and grammar, which prompts have, so that others share a batch."""
        return replace(self, seed=0, json_schema=None, regex=None, choice=None)


@dataclass(kw_only=True)
class CompletionOptions(ChatOptions):
    """Options of continuing many prompts at the same time, as a service computes them."""

    max_tokens: Annotated[int | None, Option("Maximum tokens per text.", least=0, most=MAX_TOKENS)] = 16
    echo: Annotated[bool, Option("Report the log-probabilities of the prompt's tokens too.")] = False
