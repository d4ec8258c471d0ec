"""The `vlm` command. torch is imported only inside a command."""

import os
import sys
from collections.abc import Callable, Sequence
from typing import Annotated

import typer

from vlm.benching import bench
from vlm.errors import UserError
from vlm.threads import sleep_while_waiting

app = typer.Typer(
    add_completion=False,
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    help="Train, evaluate and use small vision-language models.",
)

Checkpoint = Annotated[str, typer.Option("-c", "--checkpoint", help="The model: a .ckpt file.", metavar="CKPT")]
Device = Annotated[str, typer.Option(help="auto, cpu or cuda.")]
BatchSize = Annotated[int, typer.Option(min=1, help="Inputs at a time.")]
Format = Annotated[str, typer.Option("--format", help="text, jsonl or csv.")]
Out = Annotated[str | None, typer.Option(help="Write to this file instead of stdout.", metavar="FILE")]
Top = Annotated[int, typer.Option(min=1, help="How many classes are told of an image.")]
Seed = Annotated[int, typer.Option(help="Of what is drawn at random; the same seed gives the same text.")]
MaxTokens = Annotated[int, typer.Option(min=1, help="Longest text, in tokens.")]
Images = Annotated[list[str], typer.Argument(help="Image files, folders or patterns.")]
Trust = Annotated[str | None, typer.Option(help="Package of your own whose model classes may be loaded.")]
Sample = Annotated[bool, typer.Option("--sample", help="Draw tokens instead of searching for the most probable.")]
Temperature = Annotated[float, typer.Option(help="Below 1 keeps to what is probable.")]
TopK = Annotated[int | None, typer.Option(help="Draw among the k most probable tokens.")]
TopP = Annotated[float | None, typer.Option(help="Draw among those that together have this probability.")]
MinP = Annotated[float | None, typer.Option(help="Draw among those this probable beside the likeliest.")]
Prefix = Annotated[str, typer.Option(help="How every caption begins.")]
NoRepeat = Annotated[int, typer.Option("--no-repeat-ngram", min=0, help="No run of this many tokens comes twice.")]
Repetition = Annotated[float, typer.Option("--repetition-penalty", help="Above 1 shuns tokens that came before.")]
Ban = Annotated[list[str] | None, typer.Option(help="A word that no caption has; may be given again.", metavar="WORD")]
Require = Annotated[list[str] | None, typer.Option(help="A word that each has; may be given again.", metavar="WORD")]
Overrides = Annotated[list[str] | None, typer.Argument(metavar="[OVERRIDES]...", help="Config values, as KEY=VALUE.")]


def main() -> None:
    """Runs a command; what a user can cause leaves as a line and an exit status, never as a traceback."""
    sleep_while_waiting()
    if sys.argv[1:2] == ["train"]:
        from vlm.training import main as train

        sys.exit(train(sys.argv[2:]))
    sys.exit(_report(lambda: app(standalone_mode=False)))


def _report(command: Callable[[], int | None]) -> int:
    # typer has a copy of click of its own in newer versions; its exceptions are reached through typer.
    usage_error: type[Exception] = typer.BadParameter.__bases__[0]
    try:
        return command() or 0
    except UserError as fault:
        if os.environ.get("VLM_DEBUG") == "1":
            raise
        print(f"error: {fault}", file=sys.stderr)
        return fault.status
    except usage_error as fault:
        print(f"error: {fault.format_message()} (see vlm --help)", file=sys.stderr)  # type: ignore[attr-defined]
        return 2
    except (typer.Abort, KeyboardInterrupt):
        return 130
    except BrokenPipeError:  # whoever read the output has seen enough
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0


@app.command("train", help="Train a model: vlm train [OVERRIDES], the same as python train.py.")
def _train(overrides: Overrides = None) -> int:
    """Only for `vlm --help`; `main` takes the command before options are parsed, since overrides are Hydra's."""
    from vlm.training import main as train

    return train(overrides or [])


app.command()(bench)


@app.command()
def caption(
    images: Images,
    checkpoint: Checkpoint,
    device: Device = "auto",
    batch_size: BatchSize = 32,
    form: Annotated[str, typer.Option("--format", help="text, jsonl, csv or html.")] = "text",
    out: Out = None,
    max_tokens: Annotated[int | None, typer.Option(min=1, help="Longest caption, in tokens.")] = None,
    min_tokens: Annotated[int, typer.Option(min=0, help="Shortest caption, in tokens.")] = 0,
    beam: Annotated[int, typer.Option(min=1, help="Hypotheses kept; 1 takes the most probable token.")] = 1,
    length_penalty: Annotated[float, typer.Option(help="Beams rank by log-probability / length to this power.")] = 1.0,
    groups: Annotated[int, typer.Option(min=1, help="Groups of beams that avoid each other's tokens.")] = 1,
    diversity: Annotated[float, typer.Option(help="What a token costs that an earlier group took.")] = 0.5,
    results: Annotated[int, typer.Option(min=1, help="Captions an image.")] = 1,
    sample: Sample = False,
    temperature: Temperature = 1.0,
    top_k: TopK = None,
    top_p: TopP = None,
    min_p: MinP = None,
    prefix: Prefix = "",
    no_repeat_ngram: NoRepeat = 0,
    repetition_penalty: Repetition = 1.0,
    ban: Ban = None,
    require: Require = None,
    seed: Seed = 0,
    trace: Annotated[str | None, typer.Option(help="Write the trees of beam search as JSON.", metavar="FILE")] = None,
    resume: Annotated[bool, typer.Option("--continue", help="Skip images that --out has; append the others.")] = False,
    trust: Trust = None,
) -> int:
    """Caption images: one line an image, PATH<TAB>CAPTION. "-" reads paths from stdin."""
    from vlm.inference.continuing import begun
    from vlm.inference.files import find_images

    paths = find_images(images)
    if resume:
        if out is None or form == "html":
            raise UserError("--continue needs --out FILE, in text, jsonl or csv: there it goes on")
        has = begun(out, form=form, results=results)
        paths = [path for path in paths if not has(path)]
    if trace is not None and beam == 1:
        raise UserError("--trace writes the tree of a beam search; give --beam N, more than 1")
    writer = _caption_writer(form, out, append=resume)
    from vlm.generation.logits import Sampling
    from vlm.generation.options import Decoding
    from vlm.inference.captioning import Captioner, caption_files

    sampling = Sampling(temperature=temperature, top_k=top_k, top_p=top_p, min_p=min_p)
    captioner = Captioner(checkpoint, device=choose_device(device), trust=trust)
    rules = captioner.rules(
        prefix=prefix,
        ban=ban or (),
        require=require or (),
        min_tokens=min_tokens,
        no_repeat_ngram=no_repeat_ngram,
        repetition_penalty=repetition_penalty,
    )
    decoding = Decoding(
        beam=beam,
        groups=groups,
        diversity=diversity,
        length_penalty=length_penalty,
        results=results,
        sampling=sampling if sample else None,
        rules=rules,
        max_tokens=max_tokens,
        seed=seed,
    )
    trees: dict | None = None if trace is None else {}
    try:
        return caption_files(captioner, paths, writer, batch_size=batch_size, decoding=decoding, trees=trees)
    finally:
        writer.close()
        if trace is not None:
            _write_json(trees, trace)


def _caption_writer(form: str, out: str | None, *, append: bool):
    from vlm.inference.files import Writer

    if form != "html":
        return Writer(form=form, fields=("image", "caption"), out=out, append=append)
    if out is None:
        raise UserError("--format html needs --out FILE")
    from vlm.report.caption_page import CaptionPage

    return CaptionPage(out)


def _write_json(content: object, path: str) -> None:
    import json

    try:
        with open(path, "w", encoding="utf-8") as file:
            json.dump(content, file, ensure_ascii=False)
    except OSError as fault:
        raise UserError(f"--trace {path}: cannot be written ({fault.strerror}); choose another file", 1) from fault


@app.command()
def classify(
    images: Images,
    checkpoint: Checkpoint,
    top: Top = 1,
    device: Device = "auto",
    batch_size: BatchSize = 32,
    form: Format = "text",
    out: Out = None,
    trust: Trust = None,
) -> int:
    """Classify images: one line an image, PATH<TAB>CLASS PROBABILITY."""
    from vlm.inference.files import Writer, find_images

    paths = find_images(images)
    writer = Writer(form=form, fields=("image", "classes"), out=out)
    from vlm.inference.classifying import ImageClassifier, classify_files

    classifier = ImageClassifier(checkpoint, device=choose_device(device), trust=trust)
    try:
        return classify_files(classifier, paths, writer, batch_size=batch_size, top=top)
    finally:
        writer.close()


@app.command()
def generate(
    checkpoint: Checkpoint,
    prompt: Annotated[
        list[str] | None, typer.Option(help="Text to go on from; may be given again. Without one, lines of stdin.")
    ] = None,
    max_tokens: MaxTokens = 256,
    sample: Annotated[bool, typer.Option("--sample/--greedy", help="Draw tokens, or take the most probable.")] = True,
    temperature: Temperature = 1.0,
    top_k: TopK = None,
    top_p: TopP = None,
    min_p: MinP = None,
    seed: Seed = 0,
    device: Device = "auto",
    batch_size: BatchSize = 32,
    form: Format = "text",
    out: Out = None,
    trust: Trust = None,
) -> int:
    """Write text that goes on from prompts, token by token as it comes."""
    from vlm.inference.files import Writer

    prompts = list(prompt) if prompt else [line.rstrip("\n") for line in sys.stdin]
    if not prompts:
        raise UserError("there is no prompt; give --prompt TEXT, or a prompt a line on stdin")
    writer = Writer(form=form, fields=("prompt", "text"), out=out)
    from vlm.generation.logits import Sampling
    from vlm.inference.generating import Generator, generate_texts

    sampling = Sampling(temperature=temperature if sample else 0.0, top_k=top_k, top_p=top_p, min_p=min_p)
    generator = Generator(checkpoint, device=choose_device(device), trust=trust)
    options = {"batch_size": batch_size, "max_tokens": max_tokens, "seed": seed}
    try:
        return generate_texts(generator, prompts, writer, sampling=sampling, **options)
    finally:
        writer.close()


@app.command()
def predict(
    inputs: Annotated[list[str], typer.Argument(help="Images, or prompts for a language model.")],
    checkpoint: Checkpoint,
    device: Device = "auto",
    batch_size: BatchSize = 32,
    form: Format = "text",
    out: Out = None,
    trust: Trust = None,
) -> int:
    """Use a model of any task: what caption, classify or generate do, with their defaults."""
    from vlm import checkpoint as ckpt
    from vlm.verify import refusing

    options = {"device": device, "batch_size": batch_size, "form": form, "out": out, "trust": trust}
    loaded = ckpt.read(checkpoint)
    with refusing(checkpoint):
        task = loaded["vlm"]["task"]
    if task == "language_modeling":
        return generate(checkpoint, prompt=inputs, **options)  # type: ignore[arg-type]
    return (classify if task == "classification" else caption)(inputs, checkpoint, **options)  # type: ignore[arg-type]


@app.command()
def evaluate(
    checkpoint: Checkpoint,
    overrides: Overrides = None,
    split: Annotated[str | None, typer.Option(help="train, val or test; by default test, else val.")] = None,
    out: Annotated[str | None, typer.Option(help="Folder for metrics.json and the predictions.", metavar="DIR")] = None,
    device: Device = "auto",
    batch_size: Annotated[int | None, typer.Option(min=1, help="Inputs at a time.")] = None,
    trust: Trust = None,
) -> int:
    """Evaluate a checkpoint on a split of its data, with the controls any model should beat."""
    from vlm.evaluation import evaluate_checkpoint

    return evaluate_checkpoint(
        checkpoint, overrides or [], split=split, out=out, device=device, batch_size=batch_size, trust=trust
    )


@app.command()
def info(checkpoint: Checkpoint) -> int:
    """Say what a checkpoint holds: task, model, tokenizer, data, step and scores."""
    from vlm.inference.info import describe

    print(describe(checkpoint))
    return 0


@app.command()
def score(
    results: Annotated[str, typer.Argument(help="Captions in COCO's result format.", metavar="RESULTS.json")],
    references: Annotated[str, typer.Argument(help="COCO's annotation format.", metavar="REFERENCES.json")],
    per_image: Annotated[bool, typer.Option("--per-image", help="The scores of each image too.")] = False,
    form: Annotated[str, typer.Option("--format", help="text, json or csv.")] = "text",
    out: Out = None,
    java: Annotated[bool, typer.Option(help="METEOR and SPICE too, where pycocoevalcap and Java are there.")] = True,
) -> int:
    """Score captions as COCO's evaluation does: BLEU, ROUGE-L and CIDEr of any two files; needs no checkpoint."""
    from vlm.scoring import score_files

    return score_files(results, references, per_image=per_image, form=form, out=out, java=java)


@app.command()
def compare(
    folders: Annotated[list[str], typer.Argument(help="What vlm evaluate --out wrote, or folders of runs.")],
    out: Annotated[str | None, typer.Option(help="HTML page to write as well.", metavar="FILE")] = None,
    seed: Seed = 0,
) -> int:
    """Compare evaluations side by side, with paired bootstrap significance against the first."""
    from vlm.report.comparison import compare as compare_runs

    return compare_runs(folders, out=out, seed=seed)


@app.command("check-data")
def check_data(
    overrides: Overrides = None,
    out: Annotated[str | None, typer.Option(help="Folder for a page with faults and samples.", metavar="DIR")] = None,
    limit: Annotated[
        int | None, typer.Option(min=1, help="Samples of each split that are read; all by default.")
    ] = None,
    seed: Annotated[int, typer.Option(help="Of the samples on the page.")] = 0,
) -> int:
    """Look a data set over before hours are spent on it; exit status 1 if something would spoil a run."""
    from vlm.checking import check

    return check(overrides or [], out=out, limit=limit, seed=seed)


def choose_device(name: str) -> str:
    """The device of --device.

    Raises:
        UserError: It is unknown, or this machine has none.
    """
    if name not in ("auto", "cpu", "cuda"):
        raise UserError(f"--device: {name!r} is unknown; choose auto, cpu or cuda")
    import torch

    if name == "cuda" and not torch.cuda.is_available():
        raise UserError("--device cuda: this machine has no CUDA device that torch can use; choose cpu")
    return ("cuda" if torch.cuda.is_available() else "cpu") if name == "auto" else name


def run(argv: Sequence[str]) -> int:
    """Runs a command in this process, for tests; returns its exit status."""
    return _report(lambda: app(list(argv), standalone_mode=False))
