"""Answers a question about photos without torch or vlm: python docs/onnx_chat.py FOLDER QUESTION PHOTO...

FOLDER is that of `--to onnx` for a model that reads images inside its prompts; an empty QUESTION asks for a caption. It
needs onnxruntime, numpy, Pillow and tokenizers. Pillow resizes here, torch in vlm: pixels may differ by a few grey
levels. Each token is the likeliest; a line says so if vlm decodes this model in another way.
"""

import json
import sys
from pathlib import Path

import numpy as np
import onnxruntime
from PIL import Image, ImageOps
from tokenizers import Tokenizer

folder, question, *photos = sys.argv[1:]
about = json.loads(Path(folder, "graphs.json").read_text("utf-8"))
image, writes, prompts = about["image"], about["writes"], about.get("prompts")
if prompts is None or writes["prompt"] is None or image["resize"] == "pad":
    sys.exit(f"{folder}: needs a model with images inside prompts, a form of prompts, and no borders (resize=pad)")
graphs = {name: onnxruntime.InferenceSession(f"{folder}/{one['file']}") for name, one in about["graphs"].items()}
inputs = about["graphs"]["step"]["inputs"]
tokenizer = Tokenizer.from_file(f"{folder}/tokenizer.json")
if any(token.special and token.content in question for token in tokenizer.get_added_tokens_decoder().values()):
    sys.exit("the question contains a special token; remove it")
trained = {name: writes["options"].get(name) for name in ("beam", "sample", "no_repeat_ngram", "repetition_penalty")}
if other := [f"{name}={value}" for name, value in trained.items() if value is True or value not in (None, 0, 1)]:
    print(f"note: takes the likeliest token at each step; vlm decodes with {', '.join(other)}", file=sys.stderr)


def pixels(path: str) -> tuple[np.ndarray, int, int]:
    """A photo, as the model reads it, (T, 3, H, W), and the rows and columns of squares it is cut into."""
    photo, rows, columns = ImageOps.exif_transpose(Image.open(path)).convert("RGB"), 0, 0
    height, width = np.broadcast_to(image["image_size"], 2).tolist()
    method, longest = Image.Resampling[image["interpolation"].upper()], image.get("longest_edge")
    if longest is not None:
        short = int(longest / (max(photo.size) / min(photo.size)))
        short = max(1, short + short % 2)
        photo = photo.resize((longest, short) if photo.width >= photo.height else (short, longest), method)
    cut = []
    if image.get("tiles"):
        long = -(-max(photo.size) // width)
        short = -(-int(long * width / (max(photo.size) / min(photo.size))) // width)
        rows, columns = (short, long) if photo.width >= photo.height else (long, short)
        photo = photo.resize((columns * width, rows * width), method)
        corners = [(x * width, y * width) for y in range(rows) for x in range(columns)] if rows * columns > 1 else []
        cut = [photo.crop((x, y, x + width, y + width)) for x, y in corners]
    wide, high = int(width / image["crop"]), int(height / image["crop"])
    if image["resize"] != "squash":
        wide, high = max(wide, high * photo.width // photo.height), max(high, wide * photo.height // photo.width)
    left, top = (wide - width) // 2, (high - height) // 2
    squares = [*cut, photo.resize((wide, high), method).crop((left, top, left + width, top + height))]
    values = np.stack([np.asarray(square, np.float32) for square in squares]) / 255
    normalized = (values - np.float32(image["mean"])) / np.float32(image["std"])
    return normalized.transpose(0, 3, 1, 2), rows if cut else 0, columns


def encode(text: str) -> list[int]:
    return tokenizer.encode(text, add_special_tokens=False).ids


def prompt_ids(rows: int, columns: int) -> np.ndarray:
    """The tokens of the prompt, with -1 for each state of the image and its squares: (1, L)."""
    asked = prompts["question"].replace("{}", question) if question else prompts["caption"]
    before, after = writes["prompt"].replace("{}", asked).split(prompts["image"])
    if (id := prompts["image_id"]) is not None:  # the states have a token, so that all is encoded as one text
        states, lines = prompts["image"] * prompts["states"], [range(1, columns + 1)] * rows
        names = [[prompts["tile"].format(row, column) for column in line] for row, line in enumerate(lines, 1)]
        squares = "".join("".join(name + states for name in row) + "\n" for row in names) + "\n" * (rows > 0)
        text = before + squares + prompts["before"] + states + prompts["after"] + after
        ids = [-1 if one == id else one for one in encode(text)]
    else:
        rest = encode(prompts["anchor"] + after)[len(encode(prompts["anchor"])) :]
        ids = encode(before) + [-1] * prompts["states"] + rest
    return np.int64([[*writes["begin"], *ids, *prompts["answer"]]])


for path in photos:
    squares, *grid = pixels(path)
    ids, (states,) = prompt_ids(*grid), graphs["images"].run(None, {"images": squares})
    (vectors,) = graphs["embed"].run(None, {"tokens": np.maximum(ids, 0)})
    vectors[ids < 0] = states.reshape(-1, states.shape[-1])
    caches = {name: port["shape"] for name, port in inputs.items() if name.startswith("past")}
    state = {name: np.zeros((1, shape[1], 0, shape[3]), np.float32) for name, shape in caches.items()}
    state |= {"starts": np.int64([0])} | ({"prompts": np.int64([ids.shape[1]])} if "prompts" in inputs else {})
    written: list[int] = []
    while len(written) < writes["max_tokens"]:
        logits, *present = graphs["step"].run(None, state | {"vectors": vectors})
        state |= dict(zip(caches, present, strict=True))
        written.append(int(logits[0].argmax()))
        if written[-1] in writes["ends"]:
            break
        (vectors,) = graphs["embed"].run(None, {"tokens": np.int64([written[-1:]])})
    words = [token for token in written if token not in writes["ends"]]
    print(path, tokenizer.decode(words, skip_special_tokens=True).strip(" "), sep="\t")
