"""Labelled scenes: classes of shapes, tags and roles of words, pairs of captions."""

from collections.abc import Callable, Sequence
from functools import cached_property
from itertools import permutations, product
from typing import Unpack

import numpy as np

from vlm.data.records import Record
from vlm.data.shapes.scene_source import (
    GeneratedSource,
    Keys,
    KindOptions,
    SceneSource,
    assign_combinations,
    background_color,
    check_scenes,
)
from vlm.data.shapes.scenes import (
    COLORS,
    RADII,
    SHAPES,
    Kind,
    Scene,
    Statement,
    list_statements,
    place_objects,
    valid_captions,
)
from vlm.errors import Count, Share, UserError
from vlm.randomness import numpy_rng


class ShapeClasses(GeneratedSource):
    """Single shapes. A class is a colour and a shape, such as "red circle"; objects vary in size and position.

    Args:
        seed: Seed of every sample.
        image_size: Side of the images in pixels.
        shapes, colors, sizes: Names that `vlm.data.shapes.scenes` knows.
        train_scenes, val_scenes, test_scenes: Number of samples per split (and epoch).
    Raises:
        UserError: A name is unknown or repeated, or images are too small.
    """

    holds = ("image", "label")
    name = "shape_classes"

    def __init__(
        self,
        *,
        seed: int,
        image_size: Count = 64,
        shapes: list[str],
        colors: list[str],
        sizes: list[str],
        train_scenes: Count,
        val_scenes: Count,
        test_scenes: Count,
    ) -> None:
        super().__init__(seed, {"train": train_scenes, "val": val_scenes, "test": test_scenes})
        check_scenes(image_size=image_size, shapes=shapes, colors=colors, sizes=sizes)
        looks = list(product(colors, shapes))
        if len(looks) < 2:
            raise UserError("data.source: one colour of one shape is one class; add to data.source.shapes or .colors")
        self.image_size, self.classes = image_size, [f"{color} {shape}" for color, shape in looks]
        self._kinds = [[Kind(size, color, shape) for size in sizes] for color, shape in looks]

    def sample(self, keys: Keys) -> Record:
        """A shape on its background. Classes alternate, so that all have the same frequency."""
        label = keys.place % len(self.classes)
        rng, kinds = numpy_rng("shape", keys.seed, keys.id), self._kinds[label]
        which, *tone = rng.random(4).tolist()
        objects = place_objects((kinds[int(which * len(kinds))],), self.image_size, rng)
        scene = Scene(objects, background_color(tone), self.image_size)
        return keys.record({"label": label, "class": self.classes[label]}, scene)


INVERSE = {"left of": "right of", "right of": "left of", "above": "below", "below": "above"}
CLASSES = ("different", "same")
UNRELATED_SHARE = 0.15  # share of different pairs with an unrelated relation, which a bag of words could detect


def relation_caption(subject: Kind, relation: str, landmark: Kind) -> str:
    return f"a {subject} {relation} a {landmark}"


def make_second_caption(subject: Kind, relation: str, landmark: Kind, same: bool, rng: np.random.Generator) -> str:
    """A caption with the same meaning from the landmark's side, or one with another meaning.

    Most of the latter have the same words as a caption with the same meaning: the kinds or parts of their looks are
    exchanged.
    """
    inverse = INVERSE[relation]
    if same:
        return relation_caption(landmark, inverse, subject)
    if rng.random() < UNRELATED_SHARE:
        wrong = [name for name in INVERSE if name != inverse]
        return relation_caption(landmark, wrong[int(rng.integers(len(wrong)))], subject)
    if rng.random() < 0.5:
        return relation_caption(subject, inverse, landmark)
    differing = [at for at in range(3) if subject[at] != landmark[at]]
    at = differing[rng.integers(len(differing))]  # size, colour or shape, which are exchanged
    parts = list(subject), list(landmark)
    parts[0][at], parts[1][at] = landmark[at], subject[at]
    return relation_caption(Kind(*parts[1]), inverse, Kind(*parts[0]))


class ScenePairs(GeneratedSource):
    """Pairs of captions; splits share no pair of kinds in their first captions.

    Args:
        seed, shapes, colors, sizes: See `vlm.data.shapes.scene_source.SceneSource`.
        train_pairs, val_pairs, test_pairs: Number of pairs per split (and epoch).
    Raises:
        UserError: A name is unknown or repeated, or there are too few kinds.
    """

    holds = ("text", "label")
    name = "pairs of captions"
    classes = CLASSES

    def __init__(
        self,
        *,
        seed: int,
        shapes: list[str],
        colors: list[str],
        sizes: list[str],
        train_pairs: Count,
        val_pairs: Count,
        test_pairs: Count,
    ) -> None:
        super().__init__(seed, {"train": train_pairs, "val": val_pairs, "test": test_pairs})
        check_scenes(shapes=shapes, colors=colors, sizes=sizes)
        self._combinations = assign_combinations([Kind(*parts) for parts in product(sizes, colors, shapes)], 2, seed)
        if not all(self._combinations.values()):
            raise UserError("data.source: too few kinds for three splits; add to data.source.shapes or .colors")

    def sample(self, keys: Keys) -> Record:
        """A pair. Classes alternate, so that both have the same frequency."""
        rng, label = numpy_rng("pair of captions", keys.seed, keys.id), keys.place % 2
        combinations = self._combinations[keys.split]
        kinds = combinations[int(rng.integers(len(combinations)))]
        subject, landmark = (kinds[at] for at in rng.permutation(2))
        relation = tuple(INVERSE)[rng.integers(len(INVERSE))]
        text = relation_caption(subject, relation, landmark)
        pair = make_second_caption(subject, relation, landmark, bool(label), rng)
        return keys.record({"text": text, "pair": pair, "label": label, "class": CLASSES[label]})


RELATIONS = ("left", "right", "of", "above", "below")
TAGS = dict.fromkeys(RADII, "size") | dict.fromkeys(COLORS, "colour") | dict.fromkeys(SHAPES, "shape")
TAGS |= dict.fromkeys(RELATIONS, "relation")


class SceneWords(SceneSource):
    """One caption per scene, whose words are tagged as size, colour, shape, relation or other.

    Args:
        train_captions, val_captions, test_captions: Number of captions per split (and epoch).
        object_weights, options: See SceneSource.
    """

    holds = ("text", "words", "tags")
    name = "words of captions"

    def __init__(
        self,
        *,
        train_captions: Count,
        val_captions: Count,
        test_captions: Count,
        object_weights: Sequence[float] = (1, 2, 1),
        **options: Unpack[KindOptions],
    ) -> None:
        scenes = {"train_scenes": train_captions, "val_scenes": val_captions, "test_scenes": test_captions}
        super().__init__(**scenes, object_weights=object_weights, **options)

    def sample(self, keys: Keys) -> Record:
        captions = valid_captions(self.scene(keys))
        words = captions[numpy_rng("words of a caption", *keys).integers(len(captions))].split()
        return keys.record(
            {"text": " ".join(words), "words": words, "tags": [TAGS.get(word, "other") for word in words]}
        )

    def word_probabilities(self, words: Sequence[str | None]) -> list[dict[str, float]] | None:
        """Probability of each word in each gap, over all captions of one or two objects.

        All orders, sizes, colours, shapes and relations are equally likely, so all captions of a length are too.
        """
        if self.max_objects > 2:
            return None  # two relations of one subject are not equally likely in all combinations
        texts = self._captions.get(len(words), np.empty((0, len(words)), np.str_))
        for at, word in enumerate(words):
            texts = texts if word is None else texts[texts[:, at] == word]
        gaps = (texts[:, at] for at, word in enumerate(words) if word is None)
        counts = (np.unique(gap, return_counts=True) for gap in gaps)
        return [
            {str(word): int(number) / len(texts) for word, number in zip(*values_and_counts, strict=True)}
            for values_and_counts in counts
        ]

    @cached_property
    def _captions(self) -> dict[int, np.ndarray]:
        """All captions of one and two objects, split into words, by number of words: (captions, words)."""
        pairs = (
            (subject, relation, landmark) for subject, landmark in permutations(self.kinds, 2) for relation in INVERSE
        )
        texts = [*(f"a {kind}" for kind in self.kinds), *(relation_caption(*parts) for parts in pairs)]
        by_length: dict[int, list[list[str]]] = {}
        for words in map(str.split, texts):
            by_length.setdefault(len(words), []).append(words)
        return {length: np.array(captions) for length, captions in by_length.items()}


Phrase = tuple[str, str]  # words, and their role; "" for words without one


def caption(statement: Statement) -> list[Phrase]:
    """A caption: a red circle left of a blue cross."""
    return [*_indefinite(statement.subject, "subject"), *_places(statement, _indefinite)]


def there_is(statement: Statement) -> list[Phrase]:
    """There is a red circle left of a blue cross."""
    return [("there is", ""), *caption(statement)]


def definite_sentence(statement: Statement) -> list[Phrase]:
    """The red circle is left of the blue cross."""
    return [*_definite(statement.subject, "subject"), ("is", ""), *_places(statement, _definite)]


def place_before_subject(statement: Statement) -> list[Phrase]:
    """Left of a blue cross is a red circle."""
    return [*_places(statement, _indefinite), ("is", ""), *_indefinite(statement.subject, "subject")]


def landmark_with_subject(statement: Statement) -> list[Phrase]:
    """A blue cross with a red circle left of it."""
    (relation, landmark), *_ = statement.places
    subject = _indefinite(statement.subject, "subject")
    return [*_indefinite(landmark, "landmark"), ("with", ""), *subject, (relation, "relation"), ("it", "")]


def _indefinite(kind: Kind, role: str) -> list[Phrase]:
    article, _, name = kind.with_article.partition(" ")
    return [(article, ""), (name, role)]


def _definite(kind: Kind, role: str) -> list[Phrase]:
    return [("the", ""), (str(kind), role)]


def _places(statement: Statement, noun_phrase: Callable[[Kind, str], list[Phrase]]) -> list[Phrase]:
    """The relations of the subject, joined by "and"."""
    phrases: list[Phrase] = []
    for relation, landmark in statement.places:
        conjunction = [("and", "")] if phrases else []
        phrases += [*conjunction, (relation, "relation"), *noun_phrase(landmark, "landmark")]
    return phrases


# Forms of a sentence by the number of its landmarks.
FORMS: dict[int, tuple[Callable[[Statement], list[Phrase]], ...]] = {
    0: (caption, there_is),
    1: (caption, there_is, definite_sentence, place_before_subject, landmark_with_subject),
    2: (caption, there_is, definite_sentence, place_before_subject),
}


def tag_phrases(phrases: list[Phrase]) -> tuple[list[str], list[str]]:
    """Returns the words of phrases and their tags: B-ROLE, I-ROLE, or O for words without a role."""
    words, tags = [], []
    for text, role in phrases:
        for at, word in enumerate(text.split()):
            words.append(word)
            tags.append(f"{'I' if at else 'B'}-{role}" if role else "O")
    return words, tags


class SceneRoles(SceneSource):
    """One sentence per scene; tags mark which object is placed (subject), where (relation) and by which (landmark).

    All words of objects occur as subject and as landmark, and which one it is depends on words before or after it.
    Roles are those of spatial role labelling, where a subject is called trajector (Kordjamshidi et al. 2012,
    SemEval-2012 Task 3).

    Args:
        train_captions, val_captions, test_captions: Number of sentences per split (and epoch).
        omit_adjectives: Probability with which each size and colour is left out.
        options: See SceneSource.
    """

    holds = ("text", "words", "tags")
    name = "roles in captions"

    def __init__(
        self,
        *,
        train_captions: Count,
        val_captions: Count,
        test_captions: Count,
        omit_adjectives: Share = 0.0,
        **options: Unpack[KindOptions],
    ) -> None:
        super().__init__(train_scenes=train_captions, val_scenes=val_captions, test_scenes=test_captions, **options)
        self.omit_adjectives = omit_adjectives

    def sample(self, keys: Keys) -> Record:
        true, rng = list_statements(self.scene(keys)), numpy_rng("roles in a caption", *keys)
        statement = true[int(rng.integers(len(true)))].omit_adjectives(self.omit_adjectives, rng)
        forms = FORMS[len(statement.places)]
        words, tags = tag_phrases(forms[int(rng.integers(len(forms)))](statement))
        return keys.record({"text": " ".join(words), "words": words, "tags": tags})
