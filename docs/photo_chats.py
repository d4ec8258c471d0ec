"""Write tables of conversations about images from easy-VQA and Flickr8k, for experiment=conversations_photos.

    python docs/photo_chats.py DIR

DIR has `easy_vqa` (the folder `easy_vqa/data` of the package `easy-vqa`) and `flickr8k` (docs/captioning.md). The
tables are `DIR/easy_vqa.jsonl` and `DIR/flickr8k.jsonl`. Training conversations have one to three questions of
easy-VQA, or one or two requests that captions of Flickr8k answer. Validation has 100 of easy-VQA's training images and
50 photos of Flickr8k's; test is easy-VQA's, with one question per conversation.
"""

import json
import random
import sys
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path

from vlm.data.sources.questions import KINDS

FIRST = ("Describe the photo.", "What is in the photo?", "What is happening here?", "Write a caption for this photo.")
AGAIN = ("Say it in other words.", "Describe it again.", "How would someone else describe it?")


def easy_vqa_rows(root: Path, draw: random.Random) -> Iterator[dict[str, object]]:
    for part in ("train", "test"):
        turns_by_image = defaultdict(list)
        for question, answer, image in json.loads((root / "easy_vqa" / part / "questions.json").read_text()):
            turns_by_image[image].append({"user": question, "assistant": answer})
        for image, turns in turns_by_image.items():
            draw.shuffle(turns)
            split = "val" if part == "train" and image < 100 else part
            while turns:
                length = draw.randint(1, 3) if split == "train" else 1
                name = f"easy_vqa/{part}/images/{image}.png"
                kind = KINDS.get(turns[0]["assistant"], "color") if length == 1 else "several"
                yield {"image": name, "texts": turns[:length], "kind": kind, "split": split}
                del turns[:length]


def flickr8k_rows(root: Path, draw: random.Random) -> Iterator[dict[str, object]]:
    folder = root / "flickr8k"
    captions = defaultdict(list)
    for line in (folder / "Flickr8k.token.txt").read_text().splitlines():
        key, caption = line.split("\t")
        captions[key.rpartition("#")[0]].append(f"{caption.rstrip(' .')}.")
    for part, split, most in (("train", "train", None), ("dev", "val", 50)):
        for name in (folder / f"Flickr_8k.{part}Images.txt").read_text().split()[:most]:
            answers = draw.sample(captions[name], len(captions[name]))
            while answers:
                requests = (draw.choice(FIRST), draw.choice(AGAIN))[: draw.randint(1, 2)]
                turns = [{"user": user, "assistant": answer} for user, answer in zip(requests, answers, strict=False)]
                yield {"image": f"flickr8k/images/{name}", "texts": turns, "split": split}
                del answers[: len(turns)]


if __name__ == "__main__":
    root = Path(sys.argv[1])
    for name, make_rows in (("easy_vqa", easy_vqa_rows), ("flickr8k", flickr8k_rows)):
        lines = [json.dumps(row) for row in make_rows(root, random.Random(0))]
        (root / f"{name}.jsonl").write_text("\n".join(lines) + "\n")
        print(f"{name}.jsonl: {len(lines)} conversations")
