"""Captioning images with a trained model: load, preprocess, predict, format."""

from collections.abc import Sequence
from dataclasses import dataclass
from math import exp

import torch
from PIL import Image
from torch import Tensor

from vlm import checkpoint as ckpt
from vlm.data.image import Preprocess
from vlm.data.tokenizer import Tokenizer, tokenizer_from_state
from vlm.errors import UserError
from vlm.generation.search import greedy
from vlm.inference.files import Writer, read_images
from vlm.models.vision_language import VisionLanguageModel


@dataclass
class Caption:
    """A caption, its log-probability in nats, and its confidence: the geometric mean of its tokens' probabilities."""

    text: str
    logprob: float
    confidence: float


@torch.inference_mode()
def caption_pixels(
    model: VisionLanguageModel, tokenizer: Tokenizer, preprocess: Preprocess, pixels: Tensor, *, max_tokens: int
) -> list[Caption]:
    """Captions preprocessed images; validation, evaluation and `vlm caption` all decode through here.

    Shapes:
        pixels uint8 (B, 3, H, W) -> B captions
    """
    context = model.encode(preprocess.normalize(pixels))
    found = greedy(model.decoder, context, bos_id=tokenizer.bos_id, eos_id=tokenizer.eos_id, max_tokens=max_tokens)
    return [
        Caption(tokenizer.decode(tokens), sum(logprobs), exp(sum(logprobs) / max(1, len(logprobs))))
        for tokens, logprobs in zip(found.tokens, found.logprobs, strict=True)
    ]


class Captioner:
    """A trained captioning model, ready to use.

    Args:
        path: The checkpoint.
        device: Where to run.
        trust: A package of the user's own whose model classes may be built.
    Raises:
        UserError: The checkpoint cannot be used for captioning.
    """

    def __init__(self, path: str, *, device: torch.device | str = "cpu", trust: str | None = None) -> None:
        loaded = ckpt.read(path)
        about = loaded["vlm"]
        if about["task"] != "captioning":
            raise UserError(f"{path}: holds a model for {about['task']}, not for captioning; use `vlm predict`")
        self.tokenizer = tokenizer_from_state(about["tokenizer"])
        self.preprocess = Preprocess.from_state(about["preprocess"])
        self.max_tokens: int = about["max_tokens"]
        self.model = ckpt.load_model(loaded, trust=trust).to(device)
        self.device = device

    def pixels(self, image: Image.Image) -> Tensor:
        """An image as the model reads it, uint8 (3, H, W)."""
        return self.preprocess(image)

    def caption(self, pixels: Sequence[Tensor], *, max_tokens: int | None = None) -> list[Caption]:
        """Captions a batch of images that `pixels` made."""
        batch = torch.stack(list(pixels)).to(self.device)
        limit = self.max_tokens if max_tokens is None else max_tokens
        return caption_pixels(self.model, self.tokenizer, self.preprocess, batch, max_tokens=limit)  # type: ignore[arg-type]


def caption_files(
    captioner: Captioner, paths: Sequence[str], writer: Writer, *, batch_size: int, max_tokens: int | None = None
) -> int:
    """Captions image files in batches and writes a record for each; returns the exit status.

    A file that cannot be read is named on stderr and does not keep the others from being captioned.
    """
    failed = 0
    for good, pixels, bad in read_images(paths, captioner.pixels, batch_size=batch_size):
        failed += bad
        found = captioner.caption(pixels, max_tokens=max_tokens) if good else []
        for path, caption in zip(good, found, strict=True):
            writer.write({"image": path, "caption": caption.text, **_scores(caption)})
    return 1 if failed else 0


def _scores(caption: Caption) -> dict[str, float]:
    return {"logprob": caption.logprob, "confidence": caption.confidence}
