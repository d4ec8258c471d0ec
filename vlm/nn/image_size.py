"""Sizes of images: a single number is the side of a square, two numbers are height and width."""

from vlm.errors import Count

ImageSize = Count | tuple[Count, Count]


def sides(size: ImageSize | list[int]) -> tuple[int, int]:
    """Height and width."""
    height, width = (size, size) if isinstance(size, int) else size
    return height, width


def plain(size: ImageSize) -> int | list[int]:
    """The size as stored in configs and checkpoints."""
    height, width = sides(size)
    return height if height == width else [height, width]


def as_override(size: ImageSize) -> str:
    """The size as the value of an override: 224, or [64,512]."""
    return str(plain(size)).replace(" ", "")


def format_size(size: ImageSize) -> str:
    """Formats a size as in 64 x 512."""
    return "{} x {}".format(*sides(size))


def fit_longest_side(size: ImageSize, longest: int) -> tuple[int, int]:
    """Returns the size with the same proportions whose longer side has `longest` pixels."""
    height, width = sides(size)
    return max(1, round(longest * height / max(height, width))), max(1, round(longest * width / max(height, width)))


def grid_of(cells: int, size: ImageSize) -> tuple[int, int] | None:
    """Rows and columns of this many square cells that cover an image of this size; None if there is no such grid."""
    height, width = sides(size)
    rows, columns = round((cells * height / width) ** 0.5), round((cells * width / height) ** 0.5)
    return (rows, columns) if cells > 0 and rows * columns == cells else None
