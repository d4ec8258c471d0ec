"""`vlm score` and `vlm compare`: scores of files, and of several runs side by side."""

from collections.abc import Mapping, Sequence
from itertools import chain
from pathlib import Path
from typing import Annotated

from vlm.checkpoint.locate import find_run
from vlm.errors import UserError, print_error, printable
from vlm.evaluation.metrics.bootstrap import Difference, compute_differences
from vlm.evaluation.report.content import metric_title
from vlm.inference.options import Option, Out
from vlm.io import page
from vlm.io.output import Output, align_columns
from vlm.io.terminal import shell_line
from vlm.tasks.shared.comparison import StoredEvaluation, places, read


def score(
    results: Annotated[
        str,
        Option("COCO's result format, or FILE.txt with one text per line.", metavar="RESULTS.json", positional=True),
    ],
    references: Annotated[
        str,
        Option(
            "COCO's annotation format, or FILE.txt with one reference per line.",
            metavar="REFERENCES.json",
            positional=True,
        ),
    ],
    per_image: Annotated[bool, Option("Also print the scores of each image.", ("--per-image",))] = False,
    form: Annotated[str, Option("text, json or csv.", ("--format",), choices=("text", "json", "csv"))] = "text",
    out: Out = None,
    java: Annotated[bool, Option("Also compute METEOR and SPICE if pycocoevalcap and Java are installed.")] = True,
    clip: Annotated[
        str | None, Option("Also compute CLIPScore with the CLIPModel in this folder.", metavar="FOLDER")
    ] = None,
    images: Annotated[str | None, Option("Folder of the images, for --clip.", metavar="DIR")] = None,
    references_of: Annotated[
        str | None, Option("Reference file for CIDEr's document frequencies.", metavar="FILE")
    ] = None,
) -> int:
    """Prints the scores of captions, or of lines of text.

    Returns:
        The exit status: 1 if an image could not be scored.

    Raises:
        UserError: A file is unreadable or in another format, or the files have no image in common.
    """
    if (clip is None) != (images is None):
        raise UserError("--clip and --images: give both, the folder of a CLIP model and the folder of the images")
    from vlm.evaluation.score import FORMS, image_files, read_captions, score_texts  # sacreBLEU takes long to import
    from vlm.evaluation.score import score as score_captions

    output = Output(out, inputs=[results, references, *filter(None, [references_of])])
    if results.endswith(".txt") and references.endswith(".txt"):
        if clip or per_image or references_of:
            flags = "--per-image, --clip and --references-of"
            raise UserError(f"{results}: contains lines of text; {flags} apply only to captions")
        text = score_texts(results, references, form)
        with output:
            output.write(text)
        return 0
    captioned, larger = read_captions(results, references, references_of)
    scores = score_captions(captioned, java=java, larger=larger)
    if clip is not None and images is not None:
        from vlm.tasks.contrastive.predict import clip_scores  # torch

        files = image_files(references, Path(images), captioned.predictions)
        scores.add("clipscore", clip_scores(clip, captioned.predictions, files))
    with output:
        output.write(FORMS[form](captioned, scores, per_image))
    return 1 if captioned.without_caption or captioned.without_reference else 0


def compare(
    folders: Annotated[
        list[str], Option("Folders of vlm evaluate --out or runs, names of runs, or last.", positional=True)
    ],
    out: Annotated[str | None, Option("HTML page to write as well.", metavar="FILE")] = None,
    seed: Annotated[int, Option("Seed of the resampling.")] = 0,
) -> int:
    """Prints evaluations side by side, each compared with the first; returns the exit status.

    Raises:
        UserError: A folder holds no evaluation, there are fewer than two, or two are of different tasks or splits or
            have no sample or no score in common.
    """
    if len(folders) < 2:
        raise UserError("needs at least two runs: vlm compare RUN OTHER_RUN")
    folders = [str(find_run(folder)) for folder in folders]
    files = [str(file) for folder in folders for place in places(Path(folder)) for file in place.glob("*.json")]
    output = Output(out, inputs=files)
    runs = [read(Path(folder), name) for folder, name in zip(folders, short_names(folders), strict=True)]
    for run in runs[1:]:
        if not run.is_comparable(runs[0]):
            tasks = f"is of the task {runs[0].task}, and {run.name} of {run.task}"
            raise UserError(f"{runs[0].name}: {tasks}; compare runs of one task", 1)
        if run.split != runs[0].split:
            splits = f"has scores of {runs[0].split}, and {run.name} of {run.split}"
            raise UserError(f"{runs[0].name}: {splits}; compare evaluations of one split (vlm evaluate --split)", 1)
    differences = [compare_samples(runs[0], run, seed=seed) for run in runs[1:]]
    for run in runs[1:]:
        if runs[0].scores.keys().isdisjoint(run.scores):
            raise UserError(f"{runs[0].name} and {run.name}: no score in common; compare evaluations of one task", 1)
    _warn_of_untested(runs)
    header, rows = build_table(runs, differences)
    print(align_columns([header, *rows]))
    if out is not None:
        legend = (
            f"Differences are from {runs[0].name}, by paired bootstrap over 1,000 resamples (Koehn 2004); "
            "an interval marked * does not contain 0."
        )
        body = [page.section("Scores", page.table(header, rows), page.paragraph(legend, "soft small"))]
        title = "Comparison of " + ", ".join(run.name for run in runs)
        with output:
            output.write(page.page(title, f"{runs[0].split} split", body))
    return 0


def _warn_of_untested(runs: Sequence[StoredEvaluation]) -> None:
    """Warns about runs without a test, whose validation scores are compared."""
    untested = [run for run in runs if run.checkpoint is not None]
    if untested:
        names = ", ".join(run.name for run in untested)
        command = shell_line(["vlm", "evaluate", "-c", str(untested[0].checkpoint), "--split", "val", "--out", "DIR"])
        remedy = f"for intervals, evaluate each run, then compare the output folders: {command}"
        compared = "validation scores are compared, without intervals"
        print_error(printable(f"not tested: {names}; their {compared}; {remedy}"), "warning")


def short_names(folders: Sequence[str]) -> list[str]:
    """Returns short names of folders: the parts of their paths that differ."""
    parts = [Path(folder).resolve().parts for folder in folders]
    if len(set(parts)) == 1:
        return [f"{Path(folder).name} ({place})" for place, folder in enumerate(folders, 1)]
    differing = [at for at in range(min(map(len, parts))) if len({path[at] for path in parts}) > 1]
    start = differing[0] if differing else min(map(len, parts))
    names = [path[start:] or path[-1:] for path in parts]
    while len({name[-1] for name in names}) == 1 and min(map(len, names)) > 1:
        names = [name[:-1] for name in names]
    return ["/".join(name) for name in names]


def compare_samples(baseline: StoredEvaluation, run: StoredEvaluation, *, seed: int) -> dict[str, Difference]:
    """Compares the per-sample metrics of two runs on their common samples; captions by language."""
    sample_names = [{*chain.from_iterable(side.compared.samples.values())} for side in (baseline, run)]
    if any(sample_names) and sample_names[0].isdisjoint(sample_names[1]):
        raise UserError(
            f"{baseline.name} and {run.name}: have no sample in common; compare evaluations of the same data", 1
        )
    samples, scoring = [side.compared.samples for side in (baseline, run)], baseline.compared.scoring
    if scoring is None or scoring is not run.compared.scoring:
        return {}
    if single_languages := sorted(samples[0].keys() ^ samples[1].keys()):
        named = ", ".join(language or "an unnamed language" for language in single_languages)
        where = f"only one of {baseline.name} and {run.name} has captions in {named}"
        print_error(printable(f"{where}, which are not compared"), "warning")
    differences: dict[str, Difference] = {}
    for language in (name for name in samples[0] if name in samples[1]):
        sides, of = [side[language] for side in samples], f" in {language}" if language else ""
        if unshared := len(sides[0].keys() ^ sides[1].keys()):
            where = f"{unshared} samples{of} are in only one of {baseline.name} and {run.name}"
            print_error(printable(f"{where}; they are not compared"), "warning")
        shared = sorted(sides[0].keys() & sides[1].keys())
        if different := [name for name in shared if sides[0][name].true != sides[1][name].true]:
            raise UserError(
                f"{different[0]}: has other references in the two evaluations; evaluate both on the same data"
            )
        if len(shared) > 1:
            (names, before), (_, after) = (scoring([side[name] for name in shared]) for side in sides)
            gains = zip(names, compute_differences(before, after, len(shared), seed=seed), strict=True)
            differences |= {f"{name}_{language}" if language else name: gain for name, gain in gains}
    return differences


def build_table(
    runs: Sequence[StoredEvaluation], differences: Sequence[Mapping[str, Difference]]
) -> tuple[list[str], list[list[str]]]:
    """Returns a header, and one row per metric: the score of each run, and its difference from the first run."""
    from vlm.evaluation.report.evaluation import format_number  # torch

    header = ["", runs[0].name]
    for run in runs[1:]:
        header += [run.name, "difference (95% interval)", "p"]
    names = [name for name in runs[0].scores if "@" not in name]
    rows = []
    for name in names:
        row = [metric_title(name), format_number(runs[0].scores[name])]
        for run, by_metric in zip(runs[1:], differences, strict=True):
            row += [format_number(run.scores.get(name)), "", ""]
            if (difference := by_metric.get(name)) is not None:
                low, high = (round(end, 4) for end in (difference.low, difference.high))  # as shown
                interval = f"({difference.low:+.4f} to {difference.high:+.4f}){'*' if low > 0 or high < 0 else ''}"
                row[-2:] = [f"{difference.value:+.4f} {interval}", f"{difference.p:.3f}"]
        rows.append(row)
    return header, rows
