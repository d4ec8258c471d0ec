"""Images of a run's samples, and the first rows of a batch."""

from types import SimpleNamespace

import torch
from PIL import Image

from vlm.data.images.image import ImageError
from vlm.data.records import Record
from vlm.data.records import Split as RecordSplit
from vlm.tasks.shared.show import example_image, row_lines


class Split(RecordSplit):
    def __init__(self, count: int, damaged: int) -> None:
        self.count, self.damaged = count, damaged

    def __len__(self) -> int:
        return self.count

    def record(self, place: int, epoch: int = 0) -> Record:
        def open_image() -> Image.Image:
            if place == self.damaged:
                raise ImageError(f"{place}.png: damaged")
            return Image.new("RGB", (1024, 512), (place, 0, 0))

        return Record(id=str(place), open_image=open_image)


def show_images(count, folder, damaged=5):
    """The images of a folder after an example of a split of so many records was written to it."""
    folder.mkdir()
    data = SimpleNamespace(final_split="test", split=lambda name: Split(count, damaged))
    assert example_image(data, folder) == str(folder / "example.png")
    return {path.name: Image.open(path) for path in sorted(folder.iterdir())}


def test_a_gallery_lies_beside_the_example(tmp_path):
    images = show_images(40, tmp_path / "many")
    assert [*images] == ["example.png", *(f"more{number}.png" for number in range(2, 8))]  # and no damaged one
    assert images.pop("example.png").size == (1024, 512)
    assert {image.size for image in images.values()} == {(512, 256)}
    assert [image.getpixel((0, 0))[0] for image in images.values()] == [10, 15, 20, 25, 30, 35]
    assert [*show_images(1, tmp_path / "one")] == ["example.png"]


def test_the_example_is_the_first_image_that_can_be_read(tmp_path):
    """An unreadable first image of the test split would end a complete training with an error."""
    images = show_images(3, tmp_path / "first", damaged=0)
    assert images["example.png"].getpixel((0, 0))[0] == 1


def test_a_row_is_a_line_for_each_of_its_texts():
    """Sixteen lines of one token each, with "<- read", were more than the scores of the whole training."""
    tokenizer = SimpleNamespace(piece=["<s>", "▁a", "▁dog", "</s>", "<pad>"].__getitem__)
    tokens, segments = torch.tensor([[0, 1, 2, 1, 2, 3, 4]]), torch.tensor([[1, 1, 1, 1, 1, 1, 0]])
    rows = SimpleNamespace(tokens=tokens, segments=segments, types=None, places=torch.tensor([2, 4]))
    assert row_lines(rows, tokenizer, limit=5) == [
        "  tokens    '<s>' '▁a' '▁dog'* '▁a' '▁dog'* ...",
        "            (▁ is a space; the model's output is read at tokens with *)",
    ]
    rows.types = torch.tensor([[0, 0, 0, 1, 2, 2, 0]])  # 2 marks words of the first text
    assert row_lines(rows, tokenizer, limit=5) == [
        "  first     '<s>' '▁a' '▁dog'",
        "  second    '▁a' '▁dog' '</s>'",
        "            (▁ is a space)",
    ]
