"""Options that several commands have, each declared once."""

from typing import Annotated

import typer

Checkpoint = Annotated[str, typer.Option("-c", "--checkpoint", help="The model: a .ckpt file.", metavar="CKPT")]
Device = Annotated[str, typer.Option(help="auto, cpu or cuda.")]
Precision = Annotated[str, typer.Option(help="auto, fp32 or bf16; auto is bf16 where the device computes in it.")]
BatchSize = Annotated[int, typer.Option(min=1, help="Inputs at a time.")]
Workers = Annotated[
    int | None,
    typer.Option(min=0, max=64, help="Threads that read images ahead; by default one a CPU, up to 8."),
]
Format = Annotated[str, typer.Option("--format", help="text, jsonl or csv.")]
Out = Annotated[str | None, typer.Option(help="Write to this file instead of stdout.", metavar="FILE")]
Trust = Annotated[str | None, typer.Option(help="Package of your own whose model classes may be loaded.")]
Images = Annotated[list[str], typer.Argument(help="Image files, folders or patterns.")]
Overrides = Annotated[list[str] | None, typer.Argument(metavar="[OVERRIDES]...", help="Config values, as KEY=VALUE.")]
Top = Annotated[int, typer.Option(min=1, help="How many classes are told of an image.")]

Seed = Annotated[int, typer.Option(help="Of what is drawn at random; the same seed gives the same text.")]
MaxTokens = Annotated[int | None, typer.Option(min=1, help="Longest text, in tokens.")]
MinTokens = Annotated[int, typer.Option(min=0, help="Shortest text, in tokens.")]
Sample = Annotated[bool, typer.Option("--sample", help="Draw tokens instead of searching for the most probable.")]
Temperature = Annotated[float, typer.Option(help="Below 1 keeps to what is probable.")]
TopK = Annotated[int | None, typer.Option(help="Draw among the k most probable tokens.")]
TopP = Annotated[float | None, typer.Option(help="Draw among those that together have this probability.")]
MinP = Annotated[float | None, typer.Option(help="Draw among those this probable beside the likeliest.")]

Beam = Annotated[int, typer.Option(min=1, help="Hypotheses kept; 1 takes the most probable token.")]
LengthPenalty = Annotated[float, typer.Option(help="Beams rank by log-probability / length to this power.")]
Groups = Annotated[int, typer.Option(min=1, help="Groups of beams that avoid each other's tokens.")]
Diversity = Annotated[float, typer.Option(help="What a token costs that an earlier group took.")]
Results = Annotated[int, typer.Option(min=1, help="Texts an input.")]
Prefix = Annotated[str, typer.Option(help="How every caption begins.")]
NoRepeat = Annotated[int, typer.Option("--no-repeat-ngram", min=0, help="No run of this many tokens comes twice.")]
Repetition = Annotated[float, typer.Option("--repetition-penalty", help="Above 1 shuns tokens that came before.")]
Ban = Annotated[list[str] | None, typer.Option(help="A word that no text has; may be given again.", metavar="WORD")]
Require = Annotated[list[str] | None, typer.Option(help="A word that each has; may be given again.", metavar="WORD")]
