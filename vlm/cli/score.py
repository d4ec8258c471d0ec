"""`vlm score`: captions in COCO's formats, or lines of text. torch is not imported."""

from pathlib import Path
from typing import Annotated

from vlm.errors import UserError
from vlm.evaluation.score import FORMS, image_files, read_captions, score_texts
from vlm.evaluation.score import score as score_captions
from vlm.inference.options import Option, Out
from vlm.io.output import Output


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
    form: Annotated[str, Option("text, json or csv.", ("--format",), choices=tuple(FORMS))] = "text",
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
