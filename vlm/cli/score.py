"""`vlm score`: captions in COCO's formats. torch is not imported."""

from typing import Annotated

from vlm.inference.options import Option, Out


def score(
    results: Annotated[str, Option("Captions in COCO's result format.", metavar="RESULTS.json", positional=True)],
    references: Annotated[str, Option("COCO's annotation format.", metavar="REFERENCES.json", positional=True)],
    per_image: Annotated[bool, Option("The scores of each image too.", ("--per-image",))] = False,
    form: Annotated[str, Option("text, json or csv.", ("--format",))] = "text",
    out: Out = None,
    java: Annotated[bool, Option("METEOR and SPICE too, where pycocoevalcap and Java are there.")] = True,
    clip: Annotated[str | None, Option("CLIPScore too, by the CLIPModel in this folder.", metavar="FOLDER")] = None,
    images: Annotated[str | None, Option("Folder of the images, for --clip.", metavar="DIR")] = None,
    references_of: Annotated[
        str | None, Option("References of a larger set, for the weights of CIDEr.", metavar="FILE")
    ] = None,
) -> int:
    """Score captions as COCO's evaluation does: BLEU, ROUGE-L and CIDEr of any two files; needs no checkpoint."""
    from vlm.evaluation.score import score_files

    return score_files(
        results,
        references,
        per_image=per_image,
        form=form,
        out=out,
        java=java,
        clip=clip,
        images=images,
        references_of=references_of,
    )
