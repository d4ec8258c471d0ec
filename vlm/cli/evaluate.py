"""The commands that judge: `vlm evaluate`, `vlm score` and `vlm compare`. torch is imported only inside a command."""

from typing import Annotated

from vlm.cli.options import Overrides
from vlm.inference.options import Checkpoint, Device, Option, Out, Trust


def evaluate(
    checkpoint: Checkpoint,
    overrides: Overrides = None,
    split: Annotated[str | None, Option("train, val or test; by default test, else val.")] = None,
    out: Annotated[str | None, Option("Folder for metrics.json and the predictions.", metavar="DIR")] = None,
    device: Device = "auto",
    batch_size: Annotated[int | None, Option("Inputs at a time.", least=1)] = None,
    trust: Trust = None,
) -> int:
    """Evaluate a checkpoint on a split of its data, with the controls any model should beat."""
    from vlm.training.run.evaluate import evaluate_checkpoint

    return evaluate_checkpoint(
        checkpoint, overrides or [], split=split, out=out, device=device, batch_size=batch_size, trust=trust
    )


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


def compare(
    folders: Annotated[list[str], Option("Folders of vlm evaluate --out, or of runs, or last.", positional=True)],
    out: Annotated[str | None, Option("HTML page to write as well.", metavar="FILE")] = None,
    seed: Annotated[int, Option("Seed of the resampling.")] = 0,
) -> int:
    """Compare evaluations side by side, with paired bootstrap significance against the first."""
    from vlm.cli.compare import compare

    return compare(folders, out=out, seed=seed)
