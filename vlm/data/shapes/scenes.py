"""A scene of coloured shapes: layout, drawing and captions.

A *kind* is a size, a colour and a shape; a scene contains no kind twice. Captions are ``a KIND``,
``a KIND REL a KIND`` and ``a KIND REL a KIND and REL a KIND``, where REL is ``left of``, ``right of``, ``above`` or
``below``; both relations of a scene of three have the first kind as their subject. Every object is named once.

A relation holds if the centres are at least `margin` pixels apart along its axis. Objects are placed so that every
pair has a relation and no pair is ambiguous: along each axis, centres are either at least a margin apart, or at most
two thirds of a margin.
"""

import math
from functools import cache
from itertools import permutations, product
from typing import NamedTuple

import numpy as np
from PIL import Image, ImageDraw

ATTEMPTS = 40
TRIES = 16
OVERSAMPLING = 8

# Half the side of an object's box, relative to the side of the image.
RADII = {"small": 0.10, "large": 0.17}

# All bright enough for a dark background, including blue and purple.
COLORS = {
    "red": (225, 45, 45),
    "green": (50, 175, 75),
    "blue": (60, 110, 245),
    "yellow": (245, 220, 50),
    "purple": (160, 70, 210),
    "orange": (245, 140, 30),
    "cyan": (60, 215, 225),
    "white": (240, 240, 240),
}


def _ring(count: int, *radii: float) -> list[tuple[float, float]]:
    """Points clockwise around a circle from its top, with these radii in turn."""
    angles = [2 * math.pi * step / count for step in range(count)]
    lengths = [radii[step % len(radii)] for step in range(count)]
    return [(r * math.sin(angle), -r * math.cos(angle)) for r, angle in zip(lengths, angles, strict=True)]


# fmt: off
_CROSS = [
    (-0.34, -1.0), (0.34, -1.0), (0.34, -0.34),
    (1.0, -0.34), (1.0, 0.34), (0.34, 0.34),
    (0.34, 1.0), (-0.34, 1.0), (-0.34, 0.34),
    (-1.0, 0.34), (-1.0, -0.34), (-0.34, -0.34),
]
# fmt: on

# Outlines in the box from (-1, -1) to (1, 1), y pointing down.
SHAPES = {
    "circle": _ring(64, 1.0),
    "square": [(-0.88, -0.88), (0.88, -0.88), (0.88, 0.88), (-0.88, 0.88)],
    "triangle": [(0.0, -1.0), (1.0, 0.9), (-1.0, 0.9)],
    "diamond": [(0.0, -1.0), (0.75, 0.0), (0.0, 1.0), (-0.75, 0.0)],
    "cross": _CROSS,
    "star": _ring(10, 1.0, 0.42),
}


class Kind(NamedTuple):
    """The look of an object, in the order in which a caption names it; a size or colour of "" is not named."""

    size: str
    color: str
    shape: str

    def __str__(self) -> str:
        return " ".join(filter(None, self))

    @property
    def with_article(self) -> str:
        """The kind after "a", or after "an" if it begins with a vowel."""
        return f"an {self}" if str(self)[0] in "aeiou" else f"a {self}"

    def omit_adjectives(self, share: float, rng: np.random.Generator) -> "Kind":
        """Returns the kind without its size, its colour or both, each omitted with the probability `share`."""
        size, color = (name if keeps else "" for name, keeps in zip(self[:2], rng.random(2) >= share, strict=True))
        return Kind(size, color, self.shape)


Combination = tuple[Kind, ...]


class SceneObject(NamedTuple):
    """An object of a scene: its kind and the pixel at its centre, x to the right and y down."""

    kind: Kind
    x: int
    y: int


class Scene(NamedTuple):
    """Everything that is drawn for one sample."""

    objects: tuple[SceneObject, ...]
    background: tuple[int, int, int]
    image_size: int


class Statement(NamedTuple):
    """A subject and its relations to the other objects."""

    subject: Kind
    places: tuple[tuple[str, Kind], ...]

    def __str__(self) -> str:
        """The statement as a caption."""
        places = " and ".join(f"{relation} {landmark.with_article}" for relation, landmark in self.places)
        return f"{self.subject.with_article} {places}".rstrip()

    def omit_adjectives(self, share: float, rng: np.random.Generator) -> "Statement":
        """Returns the statement with sizes and colours omitted, each with the probability `share`."""
        places = tuple((relation, landmark.omit_adjectives(share, rng)) for relation, landmark in self.places)
        return Statement(self.subject.omit_adjectives(share, rng), places)


@cache
def radius(size: str, image_size: int) -> int:
    """Half the side of an object's box, in pixels, without the centre pixel."""
    return round(RADII[size] * image_size)


@cache
def gap(image_size: int) -> int:
    """Minimum distance of two objects in addition to their radii, in pixels."""
    return 2 + image_size // 64


@cache
def margin(image_size: int) -> int:
    """Minimum distance of two centres along an axis, in pixels, for a relation to hold."""
    return 2 * min(radius(size, image_size) for size in RADII) + gap(image_size)


def find_relations(subject: SceneObject, landmark: SceneObject, image_size: int) -> list[str]:
    """The relations of the subject to the landmark that hold; one or two if `place_objects` placed them."""
    right, down, clear = landmark.x - subject.x, landmark.y - subject.y, margin(image_size)
    holds = {"left of": right >= clear, "right of": -right >= clear, "above": down >= clear, "below": -down >= clear}
    return [relation for relation, true in holds.items() if true]


def list_statements(scene: Scene) -> list[Statement]:
    """All true statements that name each object once."""
    true = []
    for subject, *landmarks in permutations(scene.objects):
        ways = [
            [(relation, landmark.kind) for relation in find_relations(subject, landmark, scene.image_size)]
            for landmark in landmarks
        ]
        true += [Statement(subject.kind, places) for places in product(*ways)]
    return true


def valid_captions(scene: Scene) -> list[str]:
    """All true captions, sorted."""
    return sorted(map(str, list_statements(scene)))


def place_objects(kinds: Combination, image_size: int, rng: np.random.Generator) -> tuple[SceneObject, ...]:
    """Places each kind so that no relation is ambiguous: at random, or in the corners if that fails."""
    for _ in range(ATTEMPTS):
        placed: list[SceneObject] = []
        for u, v in rng.random((TRIES, 2)).tolist():
            kind = kinds[len(placed)]
            r = radius(kind.size, image_size)
            new = SceneObject(kind, r + int(u * (image_size - 2 * r)), r + int(v * (image_size - 2 * r)))
            if all(_is_unambiguous(new, old, image_size) for old in placed):
                placed.append(new)
                if len(placed) == len(kinds):
                    return tuple(placed)
    low = max(radius(kind.size, image_size) for kind in kinds)
    corners = rng.permutation(list(product((low, image_size - 1 - low), repeat=2))).tolist()
    return tuple(SceneObject(kind, x, y) for kind, (x, y) in zip(kinds, corners, strict=False))


OVERLAP = 0.25  # largest share of the sum of two radii by which the boxes of `scatter_objects` overlap


def scatter_objects(kinds: Combination, image_size: int, rng: np.random.Generator) -> tuple[SceneObject, ...]:
    """Places each kind at random, so that boxes overlap by little and each object is seen whole or nearly.

    If random places fail, objects are placed on a grid of three rows and columns.
    """
    for _ in range(ATTEMPTS):
        placed: list[SceneObject] = []
        for u, v in rng.random((TRIES * len(kinds), 2)).tolist():
            kind = kinds[len(placed)]
            r = radius(kind.size, image_size)
            new = SceneObject(kind, r + int(u * (image_size - 2 * r)), r + int(v * (image_size - 2 * r)))
            if all(_are_apart(new, old, image_size) for old in placed):
                placed.append(new)
                if len(placed) == len(kinds):
                    return tuple(placed)
    low = max(radius(kind.size, image_size) for kind in kinds)
    grid = list(product((low, (image_size - 1) // 2, image_size - 1 - low), repeat=2))
    cells = rng.permutation(grid).tolist()
    return tuple(SceneObject(kind, x, y) for kind, (x, y) in zip(kinds, cells, strict=False))


def _are_apart(first: SceneObject, second: SceneObject, image_size: int) -> bool:
    """Returns True if the boxes of two objects overlap by at most OVERLAP along the axis on which they are further."""
    radii = radius(first.kind.size, image_size) + radius(second.kind.size, image_size)
    return max(abs(first.x - second.x), abs(first.y - second.y)) >= (1 - OVERLAP) * radii


def _is_unambiguous(first: SceneObject, second: SceneObject, image_size: int) -> bool:
    """Returns True if two objects are apart and their relation is unambiguous on both axes."""
    across, down, clear = abs(first.x - second.x), abs(first.y - second.y), margin(image_size)
    apart = radius(first.kind.size, image_size) + radius(second.kind.size, image_size) + gap(image_size)
    doubtful = 2 * clear // 3 < across < clear or 2 * clear // 3 < down < clear
    return max(across, down) >= apart and not doubtful


@cache
def draw_shape(shape: str, radius: int) -> Image.Image:
    """A shape, white on black with antialiased edges, in a box with an odd side, so that its centre is a pixel."""
    side = OVERSAMPLING * (2 * radius + 1)
    large = Image.new("L", (side, side))
    outline = [((x + 1) / 2 * (side - 1), (y + 1) / 2 * (side - 1)) for x, y in SHAPES[shape]]
    ImageDraw.Draw(large).polygon(outline, fill=255)
    return large.reduce(OVERSAMPLING)


def find_box(placed: SceneObject, image_size: int) -> tuple[int, int, int, int]:
    """The smallest box around the pixels of an object: left, top, right and bottom edge, in pixels from the corner."""
    r = radius(placed.kind.size, image_size)
    left, top, right, bottom = draw_shape(placed.kind.shape, r).getbbox() or (0, 0, 0, 0)
    x, y = placed.x - r, placed.y - r
    return x + left, y + top, x + right, y + bottom


def draw_scene(scene: Scene) -> Image.Image:
    """Draws the scene as an RGB image."""
    canvas = Image.new("RGB", (scene.image_size, scene.image_size), scene.background)
    for kind, x, y in scene.objects:
        r = radius(kind.size, scene.image_size)
        canvas.paste(COLORS[kind.color], (x - r, y - r), draw_shape(kind.shape, r))
    return canvas
