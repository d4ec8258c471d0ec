"""CLIPScore (Hessel et al. 2021): similarity of captions and images, without references, by a local CLIP."""

from collections.abc import Mapping
from pathlib import Path

from vlm.inference.inputs import open_image
from vlm.tasks.contrastive.predict import ImageRetriever

WEIGHT = 2.5  # w in CLIP-S(c, v) = w * max(cos(c, v), 0)
PROMPT = "A photo depicts "  # before each caption
BATCH = 32


def clip_scores(folder: str, captions: Mapping[str, str], files: Mapping[str, Path]) -> dict[str, float]:
    """Returns the CLIPScore of each image: 2.5 * max(cos(caption, image), 0).

    Args:
        folder: Local Hugging Face folder of a CLIPModel.
        captions: Caption by image.
        files: Image file by image.
    Raises:
        UserError: The folder is damaged or holds another model, or an image cannot be read.
    """
    predictor = ImageRetriever(folder)
    scores: dict[str, float] = {}
    names = list(captions)
    for part in (names[start : start + BATCH] for start in range(0, len(names), BATCH)):
        images = predictor.embed_images([predictor.pixels(open_image(files[name])) for name in part])
        texts = predictor.embed_texts([PROMPT + captions[name] for name in part])
        values = WEIGHT * (images * texts).sum(-1).clamp(min=0)  # (B,)
        scores |= dict(zip(part, values.tolist(), strict=True))
    return scores
