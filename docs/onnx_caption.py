"""Captions photos without torch or vlm: python docs/onnx_caption.py FOLDER PHOTO..., a folder of `--to onnx`.

Pillow resizes here, torch in vlm: pixels differ by a few grey levels. Grey borders (`resize=pad`) are not drawn. Each
token is the likeliest; a line says so if the model was trained with beams, which vlm caption then uses.
"""

import json
import sys
from pathlib import Path

import numpy as np
import onnxruntime
from PIL import Image, ImageOps

folder, *photos = sys.argv[1:]
if not Path(folder, "pieces.json").exists():
    sys.exit(f"{folder} has no pieces.json: its tokenizer writes more than its pieces")
about, pieces = (json.loads(Path(folder, f"{name}.json").read_text("utf-8")) for name in ("graphs", "pieces"))
graphs = {name: onnxruntime.InferenceSession(f"{folder}/{one['file']}") for name, one in about["graphs"].items()}
shapes = {name: port["shape"] for name, port in about["graphs"]["step"]["inputs"].items() if name.startswith("past")}
image, writes = about["image"], about["writes"]
trained = {name: writes["options"].get(name) for name in ("beam", "sample", "no_repeat_ngram", "repetition_penalty")}
if other := [f"{name}={value}" for name, value in trained.items() if value is True or value not in (None, 0, 1)]:
    print(f"note: takes the likeliest token at each step; vlm caption decodes with {', '.join(other)}", file=sys.stderr)
height, width = np.broadcast_to(image["image_size"], 2).tolist()


def pixels(path: str) -> np.ndarray:
    """The middle of a photo, as the model reads it: (3, H, W)."""
    photo = ImageOps.exif_transpose(Image.open(path)).convert("RGB")
    wide, high = int(width / image["crop"]), int(height / image["crop"])
    if image["resize"] != "squash":
        wide, high = max(wide, high * photo.width // photo.height), max(high, wide * photo.height // photo.width)
    photo = photo.resize((wide, high), Image.Resampling[image["interpolation"].upper()])
    left, top = round((wide - width) / 2), round((high - height) / 2)
    values = np.asarray(photo.crop((left, top, left + width, top + height)), np.float32) / 255
    return ((values - np.float32(image["mean"])) / np.float32(image["std"])).transpose(2, 0, 1)


state = {name: np.zeros((len(photos), shape[1], 0, shape[3]), np.float32) for name, shape in shapes.items()}
read = graphs["encoder"].run(None, {"images": np.stack([pixels(path) for path in photos])})
state |= dict(zip(about["graphs"]["encoder"]["outputs"], read, strict=True))
state["starts"], tokens = np.zeros(len(photos), np.int64), np.int64([writes["begin"]] * len(photos))
written = np.zeros((len(photos), 0), np.int64)
while written.shape[1] < writes["max_tokens"] and not np.isin(written, writes["ends"]).any(1).all():
    logits, *caches = graphs["step"].run(None, state | {"tokens": tokens})
    state |= dict(zip(shapes, caches, strict=True))
    tokens = logits.argmax(1)[:, None]
    written = np.concatenate([written, tokens], axis=1)
for path, row in zip(photos, written.tolist(), strict=True):
    end = next((place for place, token in enumerate(row) if token in writes["ends"]), len(row))
    text = "".join(pieces[token] for token in row[:end]).encode("latin1").decode("utf-8", "replace")
    print(path, text.strip(" "), sep="\t")
