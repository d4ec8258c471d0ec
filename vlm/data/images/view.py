"""Where the pixels of an image are in the view of it that a model reads, for boxes."""

from typing import NamedTuple, Self

from vlm.data.images.resize import Box, Shape, find_crop, find_padding


class View(NamedTuple):
    """A map from pixels of an image to pixels of the view: x' = scale * x + shift, from right to left if mirrored.

    Args:
        size: Width and height of the view.
        scale, shift: Of x and y.
        border: Edges of what the view shows of the image, before it is mirrored; the rest is a grey border.
        mirrored: Whether left and right are exchanged after the map.
    """

    size: tuple[int, int]
    scale: tuple[float, float]
    shift: tuple[float, float]
    border: Box
    mirrored: bool = False

    @classmethod
    def of_evaluation(cls, size: tuple[int, int], shape: Shape, resize: str, crop: float) -> Self:
        """The view that `resize_to_tensor` makes of an image.

        Args:
            size: Width and height of the image.
            shape, resize, crop: See `resize_to_tensor`.
        """
        if resize == "pad":
            return cls.of_crop((0, 0, *size), shape, pad=True)
        resized, corner = find_crop(size, shape, resize, crop)
        scale = resized[0] / size[0], resized[1] / size[1]
        shift = -float(corner[0]), -float(corner[1])
        return cls(shape[::-1], scale, shift, (0, 0, *shape[::-1]))

    @classmethod
    def of_crop(cls, box: Box, shape: Shape, *, pad: bool) -> Self:
        """The view that `resize_box` makes of a region of an image; arguments as there."""
        size, corner = find_padding(box, shape) if pad else (shape[::-1], (0, 0))
        scale = size[0] / (box[2] - box[0]), size[1] / (box[3] - box[1])
        shift = corner[0] - scale[0] * box[0], corner[1] - scale[1] * box[1]
        return cls(shape[::-1], scale, shift, (*corner, corner[0] + size[0], corner[1] + size[1]))

    def after_resize(self, size: tuple[int, int], resized: tuple[int, int]) -> Self:
        """The map from an image that is stretched first, given its width and height before and after."""
        scale = (self.scale[0] * resized[0] / size[0], self.scale[1] * resized[1] / size[1])
        return self._replace(scale=scale)

    def map_box(self, box: Box) -> Box:
        """A box of the image in the view, where it may lie partly or entirely outside."""
        left, top, right, bottom = (self.scale[at % 2] * edge + self.shift[at % 2] for at, edge in enumerate(box))
        return (self.size[0] - right, top, self.size[0] - left, bottom) if self.mirrored else (left, top, right, bottom)

    def clip_box(self, box: Box) -> Box:
        """The part of a box of the view that shows the image; of no area if none does."""
        left, top, right, bottom = self.border
        if self.mirrored:
            left, right = self.size[0] - right, self.size[0] - left
        return clip_box(box, (left, top, right, bottom))

    def unmap_box(self, box: Box) -> Box:
        """A box of the view in the image."""
        if self.mirrored:
            box = self.size[0] - box[2], box[1], self.size[0] - box[0], box[3]
        left, top, right, bottom = ((edge - self.shift[at % 2]) / self.scale[at % 2] for at, edge in enumerate(box))
        return left, top, right, bottom


def clip_box(box: Box, within: Box) -> Box:
    """The part of a box inside another one; of no area if all of it is outside."""
    left, top, right, bottom = (
        float(min(max(within[at % 2], edge), within[at % 2 + 2])) for at, edge in enumerate(box)
    )
    return left, top, right, bottom


def box_area(box: Box) -> float:
    return max(0.0, box[2] - box[0]) * max(0.0, box[3] - box[1])
