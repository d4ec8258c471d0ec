"""A cache of decoded images."""

from functools import partial

from PIL import Image

from vlm.data.records import Record, Split


class CachedImages(Split):
    """A split that decodes each image once and keeps it in memory."""

    def __init__(self, split: Split) -> None:
        self.split = split
        self._images: dict[int, list[Image.Image]] = {}

    def __len__(self) -> int:
        return len(self.split)

    def record(self, index: int, epoch: int = 0) -> Record:
        record = self.split.record(index, epoch)
        if record.open_image is not None:
            decode = [record.open_image, *record.open_more]

            def image(number: int) -> Image.Image:
                if index not in self._images:
                    self._images[index] = [one() for one in decode]
                return self._images[index][number]

            record.open_image, *record.open_more = [partial(image, number) for number in range(len(decode))]
        return record
