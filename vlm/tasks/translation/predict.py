"""Translating texts with a trained model: load, encode, predict, format; the command `translate`."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Annotated, Any

import torch
from torch import Tensor

from vlm.data.batch import InputRows
from vlm.data.text.inputs import encode_text
from vlm.decoding.options import Decoding
from vlm.errors import Count, print_error
from vlm.inference.options import DecodingOptions, ModelOptions, Option, Prefix, Texts, TraceFile, refuse_undecoded
from vlm.inference.predictor import check_outputs
from vlm.inference.text.text_rows import read_texts, rows_of
from vlm.inference.writing import Trace, Writer, write_texts
from vlm.io.output import Output, Records
from vlm.models.context import Context
from vlm.models.encoder_decoder import TextToText

TextFiles = Annotated[list[str] | None, Option("Files, a text a line; without any, stdin.", positional=True)]


def encode_texts(model: TextToText, texts: InputRows, **beside: Tensor) -> Context:
    """The context of B texts, in the precision of the weights: states (B, S, D).

    Args:
        beside: What the model reads beside the texts.
    """
    with torch.autocast(texts.tokens.device.type, enabled=False):
        return model.encode(texts.tokens, texts.segments, texts.types, texts.layout, **beside)


class Translator(Writer):
    """A trained translation model, ready to use; arguments as in Predictor. Its inputs are texts.

    Attributes:
        failed: Number of texts that could not be translated.
    """

    task = "translation"
    fields, names = ("translation",), ("text", "translation")
    model: TextToText
    failed = 0

    def restore(self, about: Mapping[str, Any]) -> None:
        super().restore(about)
        self.max_len = int(about["max_len"])

    def check(self) -> None:
        begin = torch.tensor([[self.tokenizer.bos_id]], device=self.device)
        hidden = self.model.decoder(begin, None, self.encode([""]))
        check_outputs(self.model.head(hidden), self.tokenizer.vocab_size, "tokens")

    def predict(self, inputs: Sequence[str], records: Records, *, batch_size: int) -> int:
        refuse_undecoded(inputs)
        return translate_texts(self, inputs, records, batch_size=batch_size, decoding=self.usual())

    def use(self, inputs: Sequence[str], *, prefix: str = "", batch_size: Count = 32, **decoding: Any) -> list[Any]:
        """The translation of each text, or its translations where `results` is more than 1, the best first.

        Args:
            inputs: Texts.
            prefix: Beginning of every translation.
            batch_size: Texts at a time; translations do not depend on it.
            decoding: Options of decoding.
        """
        refuse_undecoded(inputs)
        search = self.searching(DecodingOptions(**decoding), prefix)
        batches = (inputs[start : start + batch_size] for start in range(0, len(inputs), batch_size))
        return self.written(batches, search, rows=batch_size)

    @torch.inference_mode()
    def encode(self, inputs: Sequence[Any]) -> Context:
        return encode_texts(self.model, self.rows(inputs))

    def rows(self, texts: Sequence[str]) -> InputRows:
        """Texts as the encoder reads them, on the model's device."""
        samples = [[encode_text(self.tokenizer, self.max_len, text)] for text in texts]
        return rows_of(samples, self.tokenizer.pad_id, self.device)

    def keys(self, inputs: Sequence[Any]) -> Sequence[str]:
        return inputs

    def batches(self, texts: Sequence[str], batch_size: int) -> Iterator[tuple[Sequence[str], Sequence[Any]]]:
        """Texts that are translated together, with the inputs that are made of them."""
        for start in range(0, len(texts), batch_size):
            yield (texts[start : start + batch_size],) * 2

    def fits(self, text: str) -> bool:
        """True for a text that the model reads whole."""
        return len(self.tokenizer.encode(text)) + 2 <= self.max_len


def translate_texts(
    translator: Translator,
    texts: Sequence[str],
    records: Records,
    *,
    batch_size: int,
    decoding: Decoding,
    trees: dict[str, Any] | None = None,
) -> int:
    """Translates texts and writes a record for each translation, as they come; returns the exit status.

    A text that the model does not read whole is named on stderr, and translated as far as it is read.

    Args:
        batch_size, trees: As in `write_texts`.
    """
    long = [number for number, text in enumerate(texts, start=1) if not translator.fits(text)]
    room = translator.max_len - 2
    for number in long:
        print_error(f"text {number}: has more than the {room} tokens that the model reads; its end was left out")
    options: Any = {"count": len(texts), "batch_size": batch_size, "decoding": decoding, "trees": trees}
    write_texts(translator, translator.batches(texts, batch_size), records, **options)
    return 1 if long or translator.failed else 0


def command(
    model: ModelOptions,
    decoding: DecodingOptions,
    files: TextFiles = None,
    text: Texts = None,
    prefix: Prefix = "",
    trace: TraceFile = None,
) -> int:
    """Translates texts as the options say; returns the exit status."""
    texts = read_texts(files or [], text or [])
    options: Any = {"inputs": files or [], "prefix": prefix, "trace": trace}
    return translate(lambda: model.load(Translator), texts, model, decoding, **options)


def translate(
    load: Callable[[], Translator],
    texts: Sequence[str],
    model: ModelOptions,
    decoding: DecodingOptions,
    *,
    inputs: Sequence[str],
    prefix: str,
    trace: str | None,
) -> int:
    """Translates texts with a model as the options of a command say; returns the exit status.

    Args:
        load: Loads the model.
        inputs: Files that are read, none of which may be written to.
    """
    output = Output(model.out, inputs=[*inputs, model.checkpoint])
    records = Records(form=model.form, fields=Translator.fields, output=output)
    translator = load()
    search = translator.searching(decoding, prefix)
    traced = Trace(trace, beam=search.beam, inputs=[*inputs, model.checkpoint], out=model.out)
    with output, traced:
        try:
            return translate_texts(
                translator, texts, records, batch_size=model.batch_size, decoding=search, trees=traced.trees
            )
        finally:
            traced.finish()
