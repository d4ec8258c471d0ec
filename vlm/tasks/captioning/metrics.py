"""Caption metrics of data in several languages; each language is scored separately."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from statistics import fmean
from typing import Any

from torch import nn

from vlm.data.records import InLanguage, Split
from vlm.evaluation.metrics.captions import CaptionMetric
from vlm.evaluation.report.sections import Finding
from vlm.tasks.captioning.controls import beside_scores
from vlm.tasks.captioning.findings import image_findings, text_findings

INTERVAL = ("@low", "@high")  # suffixes of intervals; their means over languages are not an interval of the mean


class LanguageMetrics(nn.Module):
    """The caption metrics of each language as name_language, and their means over languages under the plain names.

    Without languages there is one metric, of the language None, whose results have the plain names.

    Args:
        languages: The languages, in the order of the results.
    """

    def __init__(self, languages: Sequence[str]) -> None:
        super().__init__()
        self.languages: list[str | None] = [*languages] or [None]
        self.metrics = nn.ModuleList(CaptionMetric() for _ in self.languages)

    def items(self) -> Iterator[tuple[str | None, CaptionMetric]]:
        """Each language with its metric."""
        return zip(self.languages, self.metrics, strict=True)  # type: ignore[arg-type]

    @property
    def first(self) -> CaptionMetric:
        """The metric of the first language, for uses that need only one."""
        return self.metrics[0]  # type: ignore[return-value]

    @property
    def note(self) -> str:
        """A note by language on units other than words."""
        notes = {language: metric.units.note for language, metric in self.items()}
        return "; ".join(": ".join(filter(None, pair)) for pair in notes.items() if pair[1])

    def predictions(self) -> list[dict[str, str]]:
        """Returns the captions in COCO's result format, with the language of each if there are languages."""
        captions = ((language, metric.predictions) for language, metric in self.items())
        rows = [(id, text, language) for language, texts in captions for id, text in texts.items()]
        return [{"image_id": id, "caption": text} | ({"language": own} if own else {}) for id, text, own in rows]

    def per_image(self) -> dict[str, Any]:
        """Returns the rows of each image by language, under "images" if there are no languages."""
        return {language or "images": metric.per_image() for language, metric in self.items()}

    def reset(self) -> None:
        for _, metric in self.items():
            metric.reset()

    def compute(self) -> dict[str, float]:
        """The scores.

        Raises:
            UserError: A language has no caption.
        """
        return self._joined(lambda language, metric: metric.compute())

    def beside_scores(self, train: Split, *, seed: int) -> dict[str, float]:
        """Returns controls, novelty and intervals as in `controls.beside_scores`, per language."""

        def results(language: str | None, metric: CaptionMetric) -> dict[str, float]:
            return beside_scores(metric, train if language is None else InLanguage(train, language), seed=seed)

        return self._joined(results)

    def findings(self, results: Mapping[str, float], *, max_tokens: int, beam: int) -> list[Finding]:
        """Returns the faults of the captions of each language.

        Args:
            results: Results of the last evaluation.
            max_tokens: Longest text, in tokens.
            beam: Hypotheses of each search with which the captions were written.
        """
        found = []
        for language, metric in self.items():
            names = {name: _named(name, language) if language else name for name in ("cider@low", "cider@shuffled")}
            own = {name: results[stored] for name, stored in names.items() if stored in results}
            several = image_findings(metric, own) + text_findings(metric, max_tokens=max_tokens, beam=beam)
            found += [one._replace(fault=f"{language}: {one.fault}") if language else one for one in several]
        return found

    def _joined(self, measure: Callable[[str | None, CaptionMetric], Mapping[str, float]]) -> dict[str, float]:
        results = {language: measure(language, metric) for language, metric in self.items()}
        if (plain := results.get(None)) is not None:
            return dict(plain)
        names = [name for name in results[self.languages[0]] if not name.endswith(INTERVAL)]
        means = {name: fmean(scores[name] for scores in results.values()) for name in names}
        return means | {
            _named(name, str(language)): value for language, scores in results.items() for name, value in scores.items()
        }


def _named(name: str, language: str) -> str:
    """The name of a language's result: cider_de, cider_de@low."""
    metric, at, kind = name.partition("@")
    return f"{metric}_{language}{at}{kind}"
