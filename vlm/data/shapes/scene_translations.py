"""Sentences about scenes with German translations, or with corrections: generated pairs of texts."""

from collections.abc import Callable
from functools import partial
from typing import Literal, NamedTuple, Unpack

import numpy as np

from vlm.data.records import Record
from vlm.data.shapes.scene_source import Keys, SceneOptions, SceneSource
from vlm.data.shapes.scenes import Kind, Statement, list_statements
from vlm.errors import Share
from vlm.randomness import numpy_rng

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


class SentencePair(NamedTuple):
    """A sentence in both languages."""

    english: str
    german: str


def noun_phrase(kind: Kind, case: Case, article: Article = "a") -> str:
    """A kind of object as a German noun phrase."""
    noun, gender = NOUNS[kind.shape]
    word, ending = DECLENSION[article, case][gender]
    adjectives = [f"{ADJECTIVES[name]}{ending}" for name in (kind.size, kind.color) if name]
    return " ".join([word, *adjectives, noun])


def translate_relations(statement: Statement, article: Article = "a") -> SentencePair:
    """The relations of a statement's subject, with a leading space; empty for a single object."""
    english = " and ".join(
        f"{relation} {landmark.with_article if article == 'a' else f'the {landmark}'}"
        for relation, landmark in statement.places
    )
    german = " und ".join(
        f"{PREPOSITIONS[relation]} {noun_phrase(landmark, 'dative', article)}"
        for relation, landmark in statement.places
    )
    german = german.replace("von dem ", "vom ")
    return SentencePair(f" {english}", f" {german}") if statement.places else SentencePair("", "")


def fill_template(english: str, german: str, case: Case, statement: Statement) -> SentencePair:
    """A sentence in which the statement, its subject in this case, replaces "{}" in both languages."""
    relations = translate_relations(statement)
    english = english.format(f"{statement.subject.with_article}{relations.english}")
    return SentencePair(english, german.format(f"{noun_phrase(statement.subject, case)}{relations.german}"))


def definite_sentence(statement: Statement) -> SentencePair:
    """A sentence with the definite article and the weak endings."""
    english, german = (
        translate_relations(statement, "the") if statement.places else SentencePair(" in the picture", " im Bild")
    )
    return SentencePair(
        f"the {statement.subject} is{english}", f"{noun_phrase(statement.subject, 'nominative', 'the')} ist{german}"
    )


def relative_clause(statement: Statement) -> SentencePair:
    """A sentence with a relative clause, whose pronoun has the noun's gender and whose verb comes last."""
    english, german = (
        translate_relations(statement) if statement.places else SentencePair(" in the picture", " im Bild")
    )
    noun, pronoun = noun_phrase(statement.subject, "nominative"), RELATIVE[NOUNS[statement.subject.shape][1]]
    return SentencePair(f"{statement.subject.with_article} that is{english}", f"{noun}, {pronoun}{german} ist")


FORMS: dict[str, Callable[[Statement], SentencePair]] = {
    "caption": partial(fill_template, "{}", "{}", "nominative"),
    "there_is": partial(fill_template, "there is {}", "es gibt {}", "accusative"),
    "infinitive": partial(fill_template, "you can see {}", "man kann {} sehen", "accusative"),
    "participle": partial(fill_template, "now I have drawn {}", "jetzt habe ich {} gezeichnet", "accusative"),
    "definite": definite_sentence,
    "relative": relative_clause,
}
_FORMS = tuple(FORMS.values())


class SceneTranslations(SceneSource):
    """One true statement per scene, in one of the forms of `vlm.data.shapes.scene_translations`.

    Args:
        hide_colors: Whether the English sentence says "colored" instead of each color, so that only the image shows it
            (Caglayan et al. 2019, "Probing the Need for Visual Context").
        omit_adjectives: Probability with which each size and colour is left out of both sentences, as in "a red circle
            left of a cross". Shorter sentences name no combination, so that some of a test occur in training too.
        options: See SceneSource.
    """

    holds = ("image", "text", "translation")
    name = "scenes in two languages"

    def __init__(
        self, *, hide_colors: bool = False, omit_adjectives: Share = 0.0, **options: Unpack[SceneOptions]
    ) -> None:
        super().__init__(**options)
        self._hidden = self.colors if hide_colors else []
        self.omit_adjectives = omit_adjectives

    def sample(self, keys: Keys) -> Record:
        scene = self.scene(keys)
        true = list_statements(scene)
        rng = numpy_rng("scene translation", *keys)
        which, form = rng.random(2).tolist()
        statement = true[int(which * len(true))].omit_adjectives(self.omit_adjectives, rng)
        english, german = _FORMS[int(form * len(_FORMS))](statement)
        text = " ".join("colored" if word in self._hidden else word for word in english.split())
        return keys.record({"text": text, "translation": german}, scene)


SHORTEST = 3  # minimum length of a word that may be misspelled
LETTERS = "abcdefghijklmnopqrstuvwxyz"


class SceneSpelling(SceneSource):
    """One true statement per scene, misspelled ("text") and correct ("translation").

    Args:
        mistakes: Share of the words of three letters or more with a mistake.
        options: See SceneSource.
    """

    holds = ("image", "text", "translation")
    name = "misspelled scenes"

    def __init__(self, *, mistakes: Share = 0.3, **options: Unpack[SceneOptions]) -> None:
        super().__init__(**options)
        self.mistakes = mistakes

    def sample(self, keys: Keys) -> Record:
        scene = self.scene(keys)
        true, rng = list_statements(scene), numpy_rng("scene spelling", *keys)
        which, form = rng.random(2).tolist()
        right, _ = _FORMS[int(form * len(_FORMS))](true[int(which * len(true))])
        words = [
            misspell(word, rng) if len(word) >= SHORTEST and rng.random() < self.mistakes else word
            for word in right.split()
        ]
        return keys.record({"text": " ".join(words), "translation": right}, scene)


def misspell(word: str, rng: np.random.Generator) -> str:
    """Makes one mistake in a word: two letters are swapped, or one is left out, doubled or replaced."""
    kind, at = int(rng.integers(4)), int(rng.integers(len(word) - 1))
    if kind == 0 and word[at] != word[at + 1]:
        return word[:at] + word[at + 1] + word[at] + word[at + 2 :]
    if kind == 1:
        return word[:at] + word[at + 1 :]
    if kind == 2:
        return word[:at] + word[at] + word[at:]
    letters = [letter for letter in LETTERS if letter != word[at]]
    return word[:at] + letters[int(rng.integers(len(letters)))] + word[at + 1 :]
