"""Compares embeddings of CLIP and SigLIP at their published sizes, with random weights, with those of `transformers`.

    python benchmarks/dual_equality.py clip siglip

The models are CLIP's ViT-B/32 and SigLIP's base with patches of 16 pixels. Their word tables have the published sizes,
of which the tokenizer uses a few rows. `transformers` saves each model, with matrices drawn with a standard deviation
of 1 / sqrt(inputs), and both sides read it. One line per model: the largest difference of the embeddings of 50
sentences and of 8 images, from equal pixels and from the files; the number of sentences with the same nearest image;
and the least margin of a nearest image over the next one in `transformers`.
"""

import argparse
import sys
import tempfile
from pathlib import Path
from random import Random

sys.path[:0] = [str(Path(__file__).parent), str(Path(__file__).parents[1] / "tests" / "helpers")]

import torch
import transformers as t
from dual import TOKENIZERS, embed_texts, embedded_images
from hugging import photos, wide
from PIL import Image
from pretrained_equality import SENTENCES, WORDS, even_out

from vlm.data.images.image import load_image
from vlm.tasks.contrastive.predict import DualClassifier

MODELS = ("clip", "siglip")


def save_model(name: str, folder: Path) -> tuple:
    """Saves a model with its tokenizer and processor; returns all three."""
    folder.mkdir(parents=True)
    tokenizer = TOKENIZERS[name](folder)
    ids = {"bos_token_id": tokenizer.bos_token_id or 1, "eos_token_id": tokenizer.eos_token_id}
    ids |= {"pad_token_id": tokenizer.pad_token_id}
    torch.manual_seed(0)
    if name == "clip":
        model, processor = t.CLIPModel(t.CLIPConfig(text_config=ids)), t.CLIPImageProcessor()
    else:
        model, processor = t.SiglipModel(t.SiglipConfig(text_config=ids)), t.SiglipImageProcessor()
    even_out(wide(model))
    for part in (model, tokenizer, processor):
        part.save_pretrained(folder)
    return model.eval(), tokenizer, processor


@torch.inference_mode()
def compare(name: str) -> bool:
    """Prints the line of a model; returns False if the sides differ."""
    with tempfile.TemporaryDirectory() as place:
        folder, draw = Path(place), Random(0)
        model, tokenizer, processor = save_model(name, folder / "model")
        ours = DualClassifier(str(folder / "model"))
        texts = [" ".join(draw.choices(WORDS, k=draw.randint(1, 6))) for _ in range(SENTENCES)]
        paths = photos(folder / "photos", 8)
        pixels = processor([Image.open(path) for path in paths], return_tensors="pt").pixel_values
        words, images = embed_texts(model, tokenizer, texts), embedded_images(model, pixels)
        found, same = ours.embed_texts(texts), ours.model.embed_images(pixels)
        seen = torch.stack([ours.pixels(load_image(path)) for path in paths])
        files = ours.model.embed_images(ours.preprocess.normalize(seen))
    gaps = [(one - other).abs().max().item() for one, other in ((words, found), (images, same), (images, files))]
    nearest = (words @ images.T).topk(2).values
    agreed = ((words @ images.T).argmax(1) == (found @ same.T).argmax(1)).sum().item()
    spread = (words.std(0).mean().item(), images.std(0).mean().item())
    equal = max(gaps[:2]) <= 1e-4 and agreed == len(texts)
    print(
        f"{name}: {'equal' if equal else 'NOT EQUAL'}; texts {gaps[0]:.1e} (deviation {spread[0]:.1e}), images "
        f"{gaps[1]:.1e} ({spread[1]:.1e}), of the files {gaps[2]:.1e}; nearest image of {agreed} of {len(texts)} "
        f"texts, least margin {(nearest[:, 0] - nearest[:, 1]).min().item():.1e}",
        flush=True,
    )
    return equal


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*", metavar="NAME", help=", ".join(MODELS))
    options = parser.parse_args()
    return 0 if all([compare(name) for name in options.names or MODELS]) else 1


if __name__ == "__main__":
    sys.exit(main())
