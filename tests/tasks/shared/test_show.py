"""Images of a run's samples."""

from types import SimpleNamespace

from PIL import Image

from vlm.data.images.image import ImageError
from vlm.data.records import Record
from vlm.tasks.shared.show import example_image


class Split:
    def __init__(self, count: int) -> None:
        self.count = count

    def __len__(self) -> int:
        return self.count

    def record(self, place: int) -> Record:
        def opened() -> Image.Image:
            if place == 5:
                raise ImageError("5.png: damaged")
            return Image.new("RGB", (1024, 512), (place, 0, 0))

        return Record(id=str(place), open_image=opened)


def shown(count, folder):
    """The images of a folder after an example of a split of so many records was written to it."""
    folder.mkdir()
    data = SimpleNamespace(final_split="test", split=lambda name: Split(count))
    assert example_image(data, folder) == str(folder / "example.png")
    return {path.name: Image.open(path) for path in sorted(folder.iterdir())}


def test_a_gallery_lies_beside_the_example(tmp_path):
    images = shown(40, tmp_path / "many")
    assert [*images] == ["example.png", *(f"more{number}.png" for number in range(2, 8))]  # and no damaged one
    assert images.pop("example.png").size == (1024, 512)
    assert {image.size for image in images.values()} == {(512, 256)}
    assert [image.getpixel((0, 0))[0] for image in images.values()] == [10, 15, 20, 25, 30, 35]
    assert [*shown(1, tmp_path / "one")] == ["example.png"]
