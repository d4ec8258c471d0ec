"""Vectors of images and texts: the pooled states of an encoder. The task has no training of its own."""

import io
from collections.abc import Iterator, Mapping, Sequence
from itertools import groupby
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from PIL import Image
from torch import Tensor, nn

from vlm.checkpoint.stored import Metadata
from vlm.data.images.image import Preprocess
from vlm.data.text.inputs import Input, encode_text
from vlm.data.text.tokenizer import tokenizer_from_state
from vlm.errors import UserError
from vlm.inference.arguments import EmbeddingArguments, ImagesToEmbed, read_texts
from vlm.inference.command_options import EmbeddingOptions
from vlm.inference.inputs import ImageSource, collect_images
from vlm.inference.predictor import (
    BatchPredictor,
    ImagePredictor,
    Rows,
    TextPredictor,
    normalize_pixels,
    note_truncation,
)
from vlm.io.files import require_pyarrow
from vlm.io.output import Output, Records
from vlm.models.classifier import Pool, default_pool, pool_states
from vlm.models.context import Context
from vlm.models.decoder import Decoder
from vlm.models.dual_encoder import DualEncoder
from vlm.models.text_encoder import TextEncoder
from vlm.models.timm_encoder import TimmEncoder

FORMS = ("npy", "parquet")


class VectorRecords(Records):
    """Collects records and writes them at the end: a NumPy matrix with one row per input, or a Parquet table.

    Args:
        form: One of FORMS.
        output: The output, which must be a file.
    Raises:
        UserError: There is no file, or the package of its form is not installed.
    """

    def __init__(self, form: str, output: Output) -> None:
        if output.path is None:
            raise UserError(f"--format {form} needs --out FILE")
        if form == "parquet":
            require_pyarrow("--format parquet")
        self.form, self.output = form, output
        self._rows: list[Mapping[str, Any] | None] = []

    def write(self, record: Mapping[str, Any]) -> None:
        self._rows.append(record)

    def miss(self) -> None:
        self._rows.append(None)

    def __exit__(self, *fault: Any) -> None:
        if fault[0] is not None or not any(self._rows):
            return
        if self.form == "parquet":
            return self.output.write(self._table())
        # One row per input, NaN if it has no vector, so that rows correspond to inputs without names.
        width = next(len(row["embedding"]) for row in self._rows if row)
        missing, file = np.full(width, np.nan, np.float32), io.BytesIO()
        np.save(file, np.stack([row["embedding"] if row else missing for row in self._rows]))
        self.output.write(file.getvalue())

    def _table(self) -> bytes:
        import pyarrow
        from pyarrow.parquet import write_table

        rows = [row for row in self._rows if row]
        names = [row["input"].encode("utf-8", "backslashreplace").decode() for row in rows]
        values = np.stack([row["embedding"] for row in rows])
        vectors = pyarrow.FixedSizeListArray.from_arrays(pyarrow.array(values.ravel()), values.shape[1])
        file = io.BytesIO()
        write_table(pyarrow.table({"input": names, "embedding": vectors}), file)
        return file.getvalue()


EmbeddingSource = str | ImageSource  # a str is a text
POOLINGS: dict[str, Pool] = {"mean": "mean", "first": "class"}


class Embedder(
    BatchPredictor[EmbeddingSource, Input | Tensor, np.ndarray, EmbeddingOptions], ImagePredictor, TextPredictor
):
    """A trained encoder of images, of texts or of both, ready to use; arguments as in Predictor.

    By default a dual encoder gives its embeddings, a classifier what its head reads, a backbone of timm its own pooled
    features, and another encoder its class token or else the mean of its states.

    Attributes:
        stated: Pooling and normalisation that the model states itself.
        max_len: Maximum number of tokens of a text, if it is less than that of the encoder.
    """

    returns = "A NumPy array of float32, the vector (dim,)"
    task = "embedding"
    fields = ("input", "embedding")
    options = EmbeddingOptions
    arguments = EmbeddingArguments
    stated: Mapping[str, Any] = {}
    max_len: int | None = None

    def restore(self, about: Metadata) -> None:
        if "preprocess" in about:
            self.preprocess = Preprocess.from_state(about["preprocess"])
        if "tokenizer" in about:
            self.tokenizer = tokenizer_from_state(about["tokenizer"])
        else:
            self.arguments = ImagesToEmbed  # type: ignore[misc]  # a model's inputs are known once it is loaded
        self.max_len = about.get("max_len")
        self.stated = dict(about.get("embedding", {}))
        if self.stated.get("pooling") not in (None, *POOLINGS) or self.stated.keys() - {"pooling", "normalize"}:
            raise ValueError(f"unsupported pooling options: {self.stated!r:.80}")

    def check(self) -> None:
        options = EmbeddingOptions()
        if self.text_encoder is not None:
            self.check_vocabulary(self.text_encoder.token_embed.weight)
            list(self.predict([self.prepare("a", options)], options))
        if self.image_encoder is not None:
            list(self.predict([self.pixels(Image.new("RGB", (1, 1)))], options))

    @property
    def text_encoder(self) -> TextEncoder | Decoder | None:
        return next((module for module in self._encoders() if isinstance(module, TextEncoder | Decoder)), None)

    @property
    def longest(self) -> int:
        """Most tokens of a text that the model reads."""
        model_max_len: int = (self.model if isinstance(self.model, DualEncoder) else self.text_encoder).max_len  # type: ignore[union-attr]
        return min(self.max_len or model_max_len, model_max_len)

    @property
    def image_encoder(self) -> nn.Module | None:
        """The image encoder; None if there is no preprocessing."""
        encoders = (module for module in self._encoders() if not isinstance(module, TextEncoder | Decoder))
        return next(encoders, None) if hasattr(self, "preprocess") else None

    def _encoders(self) -> list[Any]:
        """Returns the model's encoders; if it has none, the model itself."""
        parts = [getattr(self.model, name, None) for name in ("image_encoder", "encoder", "text_encoder")]
        return [part for part in parts if part is not None] or [self.model]

    def check_options(self, options: EmbeddingOptions) -> None:
        if options.pooling not in (None, *POOLINGS):
            raise UserError(f"--pooling: {options.pooling!r} is unknown; choose {' or '.join(POOLINGS)}")

    def sources(self, inputs: Sequence[EmbeddingSource], options: EmbeddingOptions) -> list[EmbeddingSource]:
        """Returns texts as str and images as other types, with files split into lines and folders into images."""
        self.check_options(options)
        sources: list[EmbeddingSource] = []
        for item in inputs:
            if self.text_encoder is None or (self.image_encoder is not None and not isinstance(item, str)):
                images, _ = collect_images(item)
                sources += [Path(image) if isinstance(image, str) else image for image in images]
            elif isinstance(item, str):
                sources.append(item)
            elif isinstance(item, Path):
                sources += read_texts([str(item)], [])
            else:
                raise UserError(f"a {type(item).__name__} is not a text, and this model reads only texts; give texts")
        return sources

    def prepare(self, source: EmbeddingSource, options: EmbeddingOptions) -> Input | Tensor:
        if not isinstance(source, str):
            return super().prepare(source, options)
        return encode_text(self.tokenizer, self.longest, source)

    @torch.inference_mode()
    def predict(self, batch: Sequence[Any], options: EmbeddingOptions) -> Iterator[np.ndarray]:
        pooling = options.pooling or self.stated.get("pooling")
        normalize = self.stated.get("normalize") if options.normalize is None else options.normalize
        for of_texts, group in groupby(batch, lambda item: isinstance(item, Input)):
            embed = self._texts if of_texts else self._images
            vectors = embed(list(group), pooling)
            vectors = F.normalize(vectors.float(), dim=-1) if normalize else vectors.float()
            yield from vectors.cpu().numpy()

    def _texts(self, texts: Sequence[Input], pooling: str | None) -> Tensor:
        rows = self.encode_rows([[text._replace(places=[0])] for text in texts])
        if pooling is None and isinstance(self.model, DualEncoder):
            assert rows.places is not None
            return self.model.embed_texts(rows.tokens, rows.segments, rows.places, rows.layout)
        encoder: Any = self.text_encoder
        types = () if isinstance(encoder, Decoder) else (rows.types,)
        output = encoder(rows.tokens, rows.segments, *types)
        context = output if isinstance(output, Context) else Context(output, rows.segments != 0)
        return self._pool(context.split_packed_rows(rows.layout), pooling, encoder)

    def _images(self, pixels: Sequence[Tensor], pooling: str | None) -> Tensor:
        images = normalize_pixels(self.model, self.preprocess, torch.stack(list(pixels)).to(self.device))
        if pooling is None and isinstance(self.model, DualEncoder):
            return self.model.embed_images(images)
        if pooling is None and isinstance(self.model, TimmEncoder):
            return self.model.pool_images(images)
        encoder: Any = self.image_encoder
        return self._pool(encoder(images), pooling, encoder)

    def _pool(self, context: Context, pooling: str | None, encoder: nn.Module) -> Tensor:
        """Pools states (B, S, D) as asked for, or as the model's own head does: (B, E)."""
        pool_as_head = getattr(self.model, "pool_context", None)
        if pooling is None and pool_as_head is not None:
            return pool_as_head(context)
        return pool_states(context, POOLINGS[pooling] if pooling else default_pool(encoder), None)

    def record(
        self, source: EmbeddingSource, result: np.ndarray, options: EmbeddingOptions, *, form: str = "jsonl"
    ) -> Rows:
        vector: np.ndarray | str | list[float] = result
        if form not in FORMS:
            numbers = result.astype(str)  # as few digits as distinguish them in float32
            vector = " ".join(numbers) if form in ("text", "csv") else list(map(float, numbers))
        return [{"input": self.name_of(source), "embedding": vector}]

    @classmethod
    def records(cls, form: str, output: Output, options: Any) -> Records:
        suffix = Path(output.path or "").suffix.removeprefix(".").lower()
        form = suffix if form == "text" and suffix in FORMS else form
        return VectorRecords(form, output) if form in FORMS else super().records(form, output, options)

    def notes(self, sources: Sequence[EmbeddingSource], options: EmbeddingOptions) -> Iterator[str | UserError]:
        texts = [source for source in sources if isinstance(source, str)]
        if texts and self.text_encoder is not None:
            yield from note_truncation((len(self.tokenizer.encode(text)) for text in texts), self.longest - 2)
