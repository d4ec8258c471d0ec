"""Small folders in easy-VQA's layout."""

import json
from pathlib import Path

from caption_data import picture

COLORS = ("red", "blue")


def easy_questions(images: int) -> str:
    """The file of questions: three about each of the images, which are red and blue in turn."""
    rows = []
    for number in range(images):
        color = COLORS[number % 2]
        rows += [["is it red?", "yes" if color == "red" else "no", number]]
        rows += [["what shape is it?", "circle", number], ["what color is it?", color, number]]
    return json.dumps(rows)


def draw_easy_vqa(folder: Path, images: int) -> Path:
    """The folder, with so many images in train and in test."""
    for split in ("train", "test"):
        for number in range(images):
            picture(folder / split / "images" / f"{number}.png", COLORS[number % 2])
        (folder / split / "questions.json").write_text(easy_questions(images))
    return folder
