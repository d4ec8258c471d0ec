"""Training that starts from a Hugging Face folder: `model=pretrained model.path=FOLDER`, spelt out."""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from vlm.errors import UserError

CHOICE, PATH = "model=pretrained", "model.path="
MODELS = {"captioning": "base", "classification": "classifier_small", "language_modeling": "gpt2"}
TOLD = ("activation", "norm_eps")  # of blocks, beside their sizes


def spell_out(overrides: Sequence[str]) -> list[str]:
    """Overrides with the sizes, tokenizer and preprocessing of a folder in the place of its path; others go after them.

    Raises:
        UserError: Only one of the two is there, or the folder cannot be used.
    """
    paths = [text.removeprefix(PATH) for text in overrides if text.startswith(PATH)]
    if CHOICE not in overrides and not paths:
        return list(overrides)
    if CHOICE not in overrides or len(paths) != 1:
        raise UserError(f"{CHOICE} and {PATH}FOLDER go together; give each once")
    own = [text for text in overrides if text != CHOICE and not text.startswith(PATH)]
    return [*_of_folder(paths[0]), *own]


def _of_folder(folder: str) -> Iterator[str]:
    from vlm.checkpoint.hub import fetched
    from vlm.checkpoint.hugging_face import from_folder  # torch, which `tune` comes before

    folder = str(fetched(folder))
    about = from_folder(folder)["vlm"]
    task, args = about["task"], about["model"]["args"]
    yield f"task={task}"
    yield f"model={MODELS[task]}"
    yield f"model.init_from={folder}"
    if "tokenizer" in about:
        yield "tokenizer=pretrained"
        yield f"tokenizer.path={folder}"
    if task == "language_modeling":
        yield from _sizes("model", args, "depth")
        return
    yield "model/encoder=vit"
    encoder = args["encoder"]["args"]
    yield from (f"model.encoder.{name}={encoder[name]}" for name in ("dim", "num_heads", "mlp_ratio", "patch_size"))
    yield "model.encoder.class_token=true"
    if task == "captioning":
        yield "model/position=learned"
        yield from _sizes("model.decoder", args["decoder"]["args"], "decoder_depth")
        yield f"model.size.encoder_depth={encoder['depth']}"
        yield from (f"model.encoder.{name}={encoder[name]}" for name in TOLD)
    else:
        yield "model.pool=class"
        yield from _sizes("model.encoder", encoder, "encoder_depth")
    yield from _preprocess(about["preprocess"])


def _sizes(part: str, args: Mapping[str, Any], depth: str) -> Iterator[str]:
    yield from (f"model.size.{name}={args[name]}" for name in ("dim", "num_heads", "mlp_ratio"))
    yield f"model.size.{depth}={args['depth']}"
    yield from (f"{part}.{name}={args[name]}" for name in TOLD)


def _preprocess(state: Mapping[str, Any]) -> Iterator[str]:
    yield f"data.image_size={state['image_size']}"
    yield f"++data.preprocess.resize={state['resize']}"
    yield from (f"++data.preprocess.{name}=[{','.join(map(str, state[name]))}]" for name in ("mean", "std"))
    yield f"++data.preprocess.interpolation={state['interpolation']}"
