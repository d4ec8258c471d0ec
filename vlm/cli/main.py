"""The `vlm` command. torch is imported only inside a command."""

import errno
import json
import os
import sys
from collections.abc import Callable, Sequence
from io import TextIOWrapper
from typing import Annotated

import typer

from vlm.cli import data as data_commands
from vlm.cli import options as opt
from vlm.cli import use as using
from vlm.cli.bench import bench
from vlm.cli.options import Checkpoint, Device, Out, Overrides, Seed, Trust
from vlm.errors import UserError, print_error
from vlm.inference.output import Output, Records
from vlm.tuning import tune

FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EIO)

app = typer.Typer(
    add_completion=False,
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    help="Train, evaluate and use small vision-language models.",
)


app.command("train", help="Train a model: vlm train [OVERRIDES], the same as python train.py.")(data_commands.train)
app.command()(bench)


def main() -> None:
    """Runs a command; what a user can cause leaves as a line and an exit status, never as a traceback."""
    tune()
    read_any_name()
    if sys.argv[1:2] == ["train"]:
        from vlm.training.fit import main as train

        sys.exit(train(sys.argv[2:]))
    sys.exit(_report(lambda: app(standalone_mode=False)))


def read_any_name() -> None:
    """Lets file names through that are no UTF-8: read as Python has them in paths, printed escaped."""
    for stream, errors in ((sys.stdin, "surrogateescape"), (sys.stdout, "backslashreplace")):
        if isinstance(stream, TextIOWrapper):
            stream.reconfigure(errors=errors)


def _report(command: Callable[[], int | None]) -> int:
    # typer has a copy of click of its own in newer versions; its exceptions are reached through typer.
    usage_error: type[Exception] = typer.BadParameter.__bases__[0]
    try:
        status = command() or 0
        sys.stdout.flush()
        return status
    except UserError as fault:
        if os.environ.get("VLM_DEBUG") == "1":
            raise
        print_error(fault)
        return fault.status
    except usage_error as fault:
        print_error(f"{fault.format_message()} (see vlm --help)")  # type: ignore[attr-defined]
        return 2
    except (typer.Abort, KeyboardInterrupt):
        return 130
    except BrokenPipeError:  # whoever read the output has seen enough
        _forget_stdout()
        return 0
    except OSError as fault:
        if fault.errno not in FULL:
            raise
        _forget_stdout()
        print_error(f"{fault.filename or 'stdout'}: cannot be written ({fault.strerror}); free space, or use another")
        return 1


def _forget_stdout() -> None:
    """Has Python not try again at its end to write what could not be."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


@app.command()
def caption(
    images: opt.Images,
    checkpoint: opt.Checkpoint,
    device: opt.Device = "auto",
    precision: opt.Precision = "auto",
    batch_size: opt.BatchSize = 32,
    form: Annotated[str, typer.Option("--format", help="text, jsonl, csv or html.")] = "text",
    out: opt.Out = None,
    workers: opt.Workers = None,
    max_tokens: opt.MaxTokens = None,
    min_tokens: opt.MinTokens = 0,
    beam: opt.Beam = 1,
    length_penalty: opt.LengthPenalty = 1.0,
    groups: opt.Groups = 1,
    diversity: opt.Diversity = 0.5,
    results: opt.Results = 1,
    sample: opt.Sample = False,
    temperature: opt.Temperature = 1.0,
    top_k: opt.TopK = None,
    top_p: opt.TopP = None,
    min_p: opt.MinP = None,
    prefix: opt.Prefix = "",
    no_repeat_ngram: opt.NoRepeat = 0,
    repetition_penalty: opt.Repetition = 1.0,
    ban: opt.Ban = None,
    require: opt.Require = None,
    seed: opt.Seed = 0,
    trace: Annotated[str | None, typer.Option(help="Write the trees of beam search as JSON.", metavar="FILE")] = None,
    attention: Annotated[
        str | None, typer.Option(help="Write a picture a caption of where the model looked.", metavar="DIR")
    ] = None,
    resume: Annotated[bool, typer.Option("--continue", help="Skip images that --out has; append the others.")] = False,
    trust: opt.Trust = None,
) -> int:
    """Caption images: one line an image, PATH<TAB>CAPTION. "-" reads paths from stdin."""
    from vlm.inference.files import find_images

    paths = find_images(images)
    if trace is not None and beam == 1:
        raise UserError("--trace writes the tree of a beam search; give --beam N, more than 1")
    columns = ["image", *(["rank"] if results > 1 else []), "caption", "logprob", "confidence"]
    columns += [] if attention is None else ["attention"]
    output = Output(out, inputs=[*paths, checkpoint], append=resume)
    traced = Output(trace, option="--trace", inputs=[*paths, checkpoint])
    records = using.caption_records(form, output)
    from vlm.inference.captioning import Captioner, caption_files

    captioner = Captioner(checkpoint, **using.machine(device, precision), trust=trust)
    rules = captioner.rules(
        prefix=prefix,
        ban=ban or (),
        require=require or (),
        min_tokens=min_tokens,
        no_repeat_ngram=no_repeat_ngram,
        repetition_penalty=repetition_penalty,
    )
    decoding = using.decoding_of(
        rules,
        sample=sample,
        temperature=temperature,
        top_k=top_k,
        top_p=top_p,
        min_p=min_p,
        beam=beam,
        groups=groups,
        diversity=diversity,
        length_penalty=length_penalty,
        results=results,
        max_tokens=max_tokens,
        seed=seed,
    )
    trees: dict | None = None if trace is None else {}
    options = {"batch_size": batch_size, "workers": using.choose_workers(workers)}
    observer = using.attention_of(captioner, attention)
    if resume:
        paths = using.left_over(paths, out, records, columns=columns, results=results)
    with output, records, traced:
        try:
            return caption_files(
                captioner, paths, records, decoding=decoding, trees=trees, observer=observer, **options
            )
        finally:
            if trees:
                traced.write(json.dumps(trees, ensure_ascii=False))


@app.command()
def classify(
    images: opt.Images,
    checkpoint: opt.Checkpoint,
    top: opt.Top = 1,
    device: opt.Device = "auto",
    precision: opt.Precision = "auto",
    batch_size: opt.BatchSize = 32,
    workers: opt.Workers = None,
    form: opt.Format = "text",
    out: opt.Out = None,
    trust: opt.Trust = None,
) -> int:
    """Classify images: one line an image, PATH<TAB>CLASS PROBABILITY."""
    from vlm.inference.files import find_images

    paths = find_images(images)
    output = Output(out, inputs=[*paths, checkpoint])
    records = Records(form=form, fields=("image", "classes"), output=output)
    from vlm.inference.classifying import ImageClassifier, classify_files

    classifier = ImageClassifier(checkpoint, **using.machine(device, precision), trust=trust)
    with output:
        return classify_files(
            classifier, paths, records, batch_size=batch_size, top=top, workers=using.choose_workers(workers)
        )


@app.command()
def generate(
    checkpoint: opt.Checkpoint,
    prompt: Annotated[
        list[str] | None, typer.Option(help="Text to go on from; may be given again. Without one, lines of stdin.")
    ] = None,
    max_tokens: Annotated[int, typer.Option(min=1, help="Longest text, in tokens.")] = 256,
    min_tokens: opt.MinTokens = 0,
    sample: Annotated[
        bool | None, typer.Option("--sample/--greedy", help="Draw tokens, as without --beam, or take the likeliest.")
    ] = None,
    temperature: opt.Temperature = 1.0,
    top_k: opt.TopK = None,
    top_p: opt.TopP = None,
    min_p: opt.MinP = None,
    beam: opt.Beam = 1,
    length_penalty: opt.LengthPenalty = 1.0,
    groups: opt.Groups = 1,
    diversity: opt.Diversity = 0.5,
    results: opt.Results = 1,
    no_repeat_ngram: opt.NoRepeat = 0,
    repetition_penalty: opt.Repetition = 1.0,
    ban: opt.Ban = None,
    require: opt.Require = None,
    seed: opt.Seed = 0,
    device: opt.Device = "auto",
    precision: opt.Precision = "auto",
    batch_size: opt.BatchSize = 32,
    form: opt.Format = "text",
    out: opt.Out = None,
    trust: opt.Trust = None,
) -> int:
    """Write text that goes on from prompts: token by token as it comes, or the best of a search."""
    prompts = list(prompt) if prompt else [line.rstrip("\n") for line in sys.stdin]
    if not prompts:
        raise UserError("there is no prompt; give --prompt TEXT, or a prompt a line on stdin")
    using.refuse_undecoded(prompts)
    output = Output(out, inputs=[checkpoint])
    records = Records(form=form, fields=("prompt", "text"), output=output)
    from vlm.decoding.sampling import Sampling
    from vlm.inference.generating import Generator, generate_texts
    from vlm.inference.searching import search_texts

    generator = Generator(checkpoint, **using.machine(device, precision), trust=trust)
    drawn = beam == 1 if sample is None else sample
    filters: dict = {"top_k": top_k, "top_p": top_p, "min_p": min_p}
    rules = generator.rules(
        ban=ban or (),
        require=require or (),
        min_tokens=min_tokens,
        no_repeat_ngram=no_repeat_ngram,
        repetition_penalty=repetition_penalty,
    )
    with output:
        if beam == results == groups == 1 and not rules.read_texts and not rules.required:
            sampling = Sampling(temperature=temperature if drawn else 0.0, **filters)
            options = {"batch_size": batch_size, "max_tokens": max_tokens, "seed": seed}
            return generate_texts(generator, prompts, records, sampling=sampling, **options)
        decoding = using.decoding_of(
            rules,
            sample=drawn,
            temperature=temperature,
            **filters,
            beam=beam,
            groups=groups,
            diversity=diversity,
            length_penalty=length_penalty,
            results=results,
            max_tokens=max_tokens,
            seed=seed,
        )
        return search_texts(generator, prompts, records, decoding=decoding)


@app.command()
def predict(
    inputs: Annotated[list[str], typer.Argument(help="Images, or prompts for a language model.")],
    checkpoint: opt.Checkpoint,
    device: opt.Device = "auto",
    precision: opt.Precision = "auto",
    batch_size: opt.BatchSize = 32,
    form: opt.Format = "text",
    out: opt.Out = None,
    trust: opt.Trust = None,
) -> int:
    """Use a model of any task: what caption, classify or generate do, with their defaults."""
    from vlm.checkpoint import load as ckpt
    from vlm.checkpoint.verify import refusing

    options = {"device": device, "precision": precision, "batch_size": batch_size, "form": form, "out": out}
    loaded = ckpt.read(checkpoint)
    with refusing(checkpoint):
        task = loaded["vlm"]["task"]
    if task == "language_modeling":
        return generate(checkpoint, prompt=inputs, trust=trust, **options)  # type: ignore[arg-type]
    return (classify if task == "classification" else caption)(inputs, checkpoint, trust=trust, **options)  # type: ignore[arg-type]


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
    from vlm.training.evaluate import evaluate_checkpoint

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
    from vlm.evaluation.score import score_files

    return score_files(results, references, per_image=per_image, form=form, out=out, java=java)


@app.command()
def compare(
    folders: Annotated[list[str], typer.Argument(help="What vlm evaluate --out wrote, or folders of runs.")],
    out: Annotated[str | None, typer.Option(help="HTML page to write as well.", metavar="FILE")] = None,
    seed: Seed = 0,
) -> int:
    """Compare evaluations side by side, with paired bootstrap significance against the first."""
    from vlm.evaluation.report.comparison import compare as compare_runs

    return compare_runs(folders, out=out, seed=seed)


app.command("check-data")(data_commands.check_data)
app.command("shard")(data_commands.shard)


def run(argv: Sequence[str]) -> int:
    """Runs a command in this process, for tests; returns its exit status."""
    return _report(lambda: app(list(argv), standalone_mode=False))
