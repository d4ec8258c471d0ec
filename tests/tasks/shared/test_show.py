"""Images of a run's samples."""

from types import SimpleNamespace

from PIL import Image

from vlm.data.images.image import ImageError
from vlm.data.records import Record
from vlm.tasks.shared.show import example_image


def opener(place: int):
    def opened() -> Image.Image:
        if place == 5:
            raise ImageError("5.png: damaged")
        return Image.new("RGB", (1024, 512), (place, 0, 0))

    return opened


class Split:
    def __init__(self, count: int) -> None:
        self.count = count

    def __len__(self) -> int:
        return self.count

    def record(self, place: int) -> Record:
        return Record(id=str(place), open_image=opener(place))


def test_a_gallery_lies_beside_the_example(tmp_path):
    data = SimpleNamespace(final_split="test", split=lambda name: Split(40))
    assert example_image(data, tmp_path) == str(tmp_path / "example.png")
    images = {path.name: Image.open(path) for path in sorted(tmp_path.iterdir())}
    assert [*images] == ["example.png", *(f"more{number}.png" for number in range(2, 8))]  # and no damaged one
    assert images.pop("example.png").size == (1024, 512)
    assert {image.size for image in images.values()} == {(512, 256)}
    assert [image.getpixel((0, 0))[0] for image in images.values()] == [10, 15, 20, 25, 30, 35]


def test_a_gallery_of_one_record_is_its_image(tmp_path):
    example_image(SimpleNamespace(final_split="test", split=lambda name: Split(1)), tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == ["example.png"]
