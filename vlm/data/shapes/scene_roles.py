"""Captions of drawn scenes, tagged with the role of each object: a generated tagging task that needs context."""

from collections.abc import Callable
from typing import Unpack

from vlm.data.records import Record
from vlm.data.shapes.drawn import Keys
from vlm.data.shapes.scene_source import KindOptions, SceneSource
from vlm.data.shapes.scenes import Kind, Statement, statements
from vlm.errors import Count, Share
from vlm.randomness import numpy_rng

Phrase = tuple[str, str]  # words, and their role; "" for words without one


def caption(statement: Statement) -> list[Phrase]:
    """A caption: a red circle left of a blue cross."""
    return [*_indefinite(statement.subject, "subject"), *_places(statement, _indefinite)]


def there_is(statement: Statement) -> list[Phrase]:
    """There is a red circle left of a blue cross."""
    return [("there is", ""), *caption(statement)]


def the_one_is(statement: Statement) -> list[Phrase]:
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
    1: (caption, there_is, the_one_is, place_before_subject, landmark_with_subject),
    2: (caption, there_is, the_one_is, place_before_subject),
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
        true, rng = statements(self.scene(keys)), numpy_rng("roles in a caption", *keys)
        statement = true[int(rng.integers(len(true)))].omit_adjectives(self.omit_adjectives, rng)
        forms = FORMS[len(statement.places)]
        words, tags = tag_phrases(forms[int(rng.integers(len(forms)))](statement))
        return keys.record({"text": " ".join(words), "words": words, "tags": tags})
