"""CLIPScore (Hessel et al. 2021): similarity of captions and images, without references, by a local CLIP."""

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from vlm.data.images.hugging_face import read_preprocess
from vlm.data.images.image import load_image
from vlm.errors import UserError
from vlm.models.pretrained.clip import load_clip
from vlm.models.pretrained.folder import Folder

WEIGHT = 2.5  # w in CLIP-S(c, v) = w * max(cos(c, v), 0)
PROMPT = "A photo depicts "  # before each caption
BATCH = 32


class ClipScorer:
    """Computes CLIPScore with the model of a folder: 2.5 * max(cos(caption, image), 0) per image.

    Args:
        folder: Local Hugging Face folder of a CLIPModel with tokenizer.json and preprocessor_config.json.
    Raises:
        UserError: A file is missing or damaged.
    """

    def __init__(self, folder: str) -> None:
        opened = Folder(folder)
        self.model, self.preprocess = load_clip(opened), read_preprocess(opened)
        self.tokenizer = _tokenizer(opened)
        self.tokenizer.enable_truncation(self.model.text.max_len)

    @torch.inference_mode()
    def score(self, captions: Mapping[str, str], files: Mapping[str, Path]) -> dict[str, float]:
        """The score of each image.

        Args:
            captions: Caption by image.
            files: Image file by image.
        Raises:
            UserError: An image cannot be read.
        """
        scores: dict[str, float] = {}
        for names in _parts(list(captions)):
            images = torch.stack([self.preprocess(load_image(files[name])) for name in names])
            seen = self.model.embed_images(self.preprocess.normalize(images))
            texts = self.model.embed_texts(*self._encoded([PROMPT + captions[name] for name in names]))
            values = WEIGHT * (seen * texts).sum(-1).clamp(min=0)  # (B,)
            scores |= dict(zip(names, values.tolist(), strict=True))
        return scores

    def _encoded(self, texts: Sequence[str]) -> tuple[Tensor, Tensor]:
        """Tokens (B, L) of texts, and their lengths (B,)."""
        rows = [torch.tensor(self.tokenizer.encode(text).ids) for text in texts]
        return torch.nn.utils.rnn.pad_sequence(rows, batch_first=True), torch.tensor([len(row) for row in rows])


def _tokenizer(folder: Folder) -> Any:
    from tokenizers import Tokenizer

    text = folder.text("tokenizer.json")
    if text is None:
        raise UserError(f"{folder}: has no tokenizer.json; add the one that the model was published with")
    try:
        return Tokenizer.from_str(text)
    except Exception as fault:  # the library raises nothing more special
        raise UserError(f"{folder.path / 'tokenizer.json'}: cannot be read ({fault!s:.200}); fetch it again") from fault


def _parts(names: list[str]) -> Iterator[list[str]]:
    yield from (names[start : start + BATCH] for start in range(0, len(names), BATCH))
