"""German sentences about scenes: articles and adjectives agree with the noun's gender and case.

A statement about a scene is expressed in one of several forms, whose word order differs between the languages:

    now I have drawn a small red circle left of a large blue cross
    jetzt habe ich einen kleinen roten Kreis links von einem großen blauen Kreuz gezeichnet

Adjectives take the mixed endings after *ein* and the weak ones after *der* (Duden, Die Grammatik, on the declension of
adjectives). The prepositions of place all take the dative, and *von dem* is *vom*.
"""

from collections.abc import Callable
from typing import Literal, NamedTuple

from vlm.data.shapes.scenes import Kind, Statement

Case = Literal["nominative", "accusative", "dative"]
Gender = Literal["masculine", "feminine", "neuter"]
Article = Literal["a", "the"]

NOUNS: dict[str, tuple[str, Gender]] = {
    "circle": ("Kreis", "masculine"),
    "square": ("Quadrat", "neuter"),
    "triangle": ("Dreieck", "neuter"),
    "diamond": ("Raute", "feminine"),
    "cross": ("Kreuz", "neuter"),
    "star": ("Stern", "masculine"),
}
ADJECTIVES = {
    "small": "klein",
    "large": "groß",
    "red": "rot",
    "green": "grün",
    "blue": "blau",
    "yellow": "gelb",
    "purple": "violett",
    "orange": "orangefarben",
    "cyan": "türkisfarben",
    "white": "weiß",
}
PREPOSITIONS = {"left of": "links von", "right of": "rechts von", "above": "über", "below": "unter"}

# fmt: off
# Article and ending of the adjectives after it.     masculine         feminine         neuter
DECLENSION: dict[tuple[Article, Case], dict[Gender, tuple[str, str]]] = {
    ("a", "nominative"):   {"masculine": ("ein", "er"),   "feminine": ("eine", "e"),   "neuter": ("ein", "es")},
    ("a", "accusative"):   {"masculine": ("einen", "en"), "feminine": ("eine", "e"),   "neuter": ("ein", "es")},
    ("a", "dative"):       {"masculine": ("einem", "en"), "feminine": ("einer", "en"), "neuter": ("einem", "en")},
    ("the", "nominative"): {"masculine": ("der", "e"),    "feminine": ("die", "e"),    "neuter": ("das", "e")},
    ("the", "accusative"): {"masculine": ("den", "en"),   "feminine": ("die", "e"),    "neuter": ("das", "e")},
    ("the", "dative"):     {"masculine": ("dem", "en"),   "feminine": ("der", "en"),   "neuter": ("dem", "en")},
}
# fmt: on
RELATIVE: dict[Gender, str] = {"masculine": "der", "feminine": "die", "neuter": "das"}


class Pair(NamedTuple):
    """A sentence in both languages."""

    english: str
    german: str


def phrase(kind: Kind, case: Case, article: Article = "a") -> str:
    """A kind of object as a German noun phrase."""
    noun, gender = NOUNS[kind.shape]
    word, ending = DECLENSION[article, case][gender]
    adjectives = [f"{ADJECTIVES[name]}{ending}" for name in (kind.size, kind.color) if name]
    return " ".join([word, *adjectives, noun])


def places(statement: Statement, article: Article = "a") -> Pair:
    """The relations of a statement's subject, with a leading space; empty for a single object."""
    english = " and ".join(
        f"{relation} {other.with_article if article == 'a' else f'the {other}'}" for relation, other in statement.places
    )
    german = " und ".join(
        f"{PREPOSITIONS[relation]} {phrase(other, 'dative', article)}" for relation, other in statement.places
    )
    german = german.replace("von dem ", "vom ")
    return Pair(f" {english}", f" {german}") if statement.places else Pair("", "")


def caption(statement: Statement) -> Pair:
    """A caption."""
    english, german = places(statement)
    return Pair(f"{statement.subject.with_article}{english}", f"{phrase(statement.subject, 'nominative')}{german}")


def there_is(statement: Statement) -> Pair:
    """A sentence with an accusative in German where English has a subject."""
    english, german = places(statement)
    there = phrase(statement.subject, "accusative")
    return Pair(f"there is {statement.subject.with_article}{english}", f"es gibt {there}{german}")


def you_can_see(statement: Statement) -> Pair:
    """A sentence with an infinitive, which comes last in German."""
    english, german = places(statement)
    seen = phrase(statement.subject, "accusative")
    return Pair(f"you can see {statement.subject.with_article}{english}", f"man kann {seen}{german} sehen")


def now_drawn(statement: Statement) -> Pair:
    """A sentence with an initial adverb, which puts the verb before its subject, and a participle, which comes last."""
    english, german = places(statement)
    what, drawn = statement.subject.with_article, phrase(statement.subject, "accusative")
    return Pair(f"now I have drawn {what}{english}", f"jetzt habe ich {drawn}{german} gezeichnet")


def the_one_is(statement: Statement) -> Pair:
    """A sentence with the definite article and the weak endings."""
    english, german = places(statement, "the") if statement.places else Pair(" in the picture", " im Bild")
    return Pair(f"the {statement.subject} is{english}", f"{phrase(statement.subject, 'nominative', 'the')} ist{german}")


def one_that_is(statement: Statement) -> Pair:
    """A sentence with a relative clause, whose pronoun has the noun's gender and whose verb comes last."""
    english, german = places(statement) if statement.places else Pair(" in the picture", " im Bild")
    noun, pronoun = phrase(statement.subject, "nominative"), RELATIVE[NOUNS[statement.subject.shape][1]]
    return Pair(f"{statement.subject.with_article} that is{english}", f"{noun}, {pronoun}{german} ist")


FORMS: tuple[Callable[[Statement], Pair], ...] = (
    caption,
    there_is,
    you_can_see,
    now_drawn,
    the_one_is,
    one_that_is,
)
