"""Training that starts from a Hugging Face folder: `model=pretrained model.path=FOLDER`, spelt out."""

import json
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from vlm.errors import UserError

CHOICE, PATH, TASK = "model=pretrained", "model.path=", "task="
# The model of each task that a folder's stacks go into, and the class of the encoder that it has.
MODELS = {
    "captioning": ("base", "ViT"),
    "classification": ("classifier_small", "ViT"),
    "image_questions": ("small", "ViT"),
    "language_modeling": ("gpt2", None),
    "masked_language_modeling": ("masked_lm_small", "TextEncoder"),
    "text_classification": ("text_classifier_small", "TextEncoder"),
    "tagging": ("tagger_small", "TextEncoder"),
    "span_answering": ("span_answerer_small", "TextEncoder"),
}
CAPTIONER = "small"  # whose decoder starts fresh, where a folder holds an encoder alone
# Learning rates of AdamW: of whole models (Devlin et al. 2019, appendix A.3), of adapters (Hu et al. 2022, table 11),
# and of an encoder with a decoder that starts fresh (BLIP, Li et al. 2022).
WHOLE_LR, ADAPTERS_LR, FRESH_LR = "5e-5", "2e-4", "3e-4"
SIZES = ("dim", "num_heads", "mlp_ratio")  # said once, under model.size
INJECTED = ("image_size", "vocab_size", "max_len", "depth", "context_dim")  # of the data, or said elsewhere


def spell_out(overrides: Sequence[str]) -> list[str]:
    """Overrides with the sizes, tokenizer and preprocessing of a folder in the place of its path; others go after them.

    Raises:
        UserError: Only one of the two is there, or the folder cannot be used, or not for the task.
    """
    paths = [text.removeprefix(PATH) for text in overrides if text.startswith(PATH)]
    if CHOICE not in overrides and not paths:
        return list(overrides)
    if CHOICE not in overrides or len(paths) != 1 or not paths[0]:
        raise UserError(f"{CHOICE} and {PATH}FOLDER go together; give each once")
    own = [text for text in overrides if text != CHOICE and not text.startswith((PATH, TASK))]
    task = next((text.removeprefix(TASK) for text in overrides if text.startswith(TASK)), None)
    return [*_of_folder(paths[0], task, own), *own]


def _of_folder(folder: str, task: str | None, own: Sequence[str]) -> Iterator[str]:
    from vlm.checkpoint.hub import fetched
    from vlm.checkpoint.hugging_face import describe_folder  # torch, which `tune` comes before
    from vlm.models.pretrained.folder import Folder

    place, folder = folder, str(fetched(folder))
    specified, about = describe_folder(Folder(folder))
    task = task or specified.task
    whole = task == specified.task
    _check(folder, task, specified.parts, about["origin"], whole=whole)
    fresh = task == "captioning" and not whole
    yield from (f"task={task}", f"model={CAPTIONER if fresh else MODELS[str(task)][0]}", f"model.init_from={place}")
    if not any(text.startswith("optim=") for text in own):
        rate = ADAPTERS_LR if any(text.startswith("model/adapt=") for text in own) else FRESH_LR if fresh else WHOLE_LR
        yield from ("optim=adamw", f"optim.lr={rate}")
    if "tokenizer" in about:
        yield from ("tokenizer=pretrained", f"tokenizer.path={folder}")
    if (encoder := specified.parts.get("encoder")) is not None:
        yield from _encoder(encoder)
    if (decoder := specified.parts.get("decoder")) is not None:
        yield from _decoder(decoder["args"], "model.decoder" if encoder else "model")
    elif specified.model is not None and whole:
        yield from _plain("model", specified.model["args"], ("encoder", "num_classes", "vocab_size"))
    elif task == "classification" and encoder is not None:
        yield f"model.pool={'class' if encoder['args'].get('class_token') else 'mean'}"
    elif task == "text_classification":
        yield "model.transform=true"
    if "preprocess" in about:
        yield from _preprocess(about["preprocess"])


def _check(folder: str, task: str | None, parts: Mapping[str, Any], origin: str, *, whole: bool) -> None:
    if task in MODELS and (whole or (parts.keys() == {"encoder"} and parts["encoder"]["name"] == MODELS[task][1])):
        return
    fit = [name for name, (_, kind) in MODELS.items() if "encoder" in parts and kind == parts["encoder"]["name"]]
    known = f"say which task it is for: task={' or task='.join(fit)}" if fit else "leave task out"
    raise UserError(
        f"{PATH}{folder}: a {origin} {'is for no task alone' if task is None else f'is not for {task}'}; {known}"
    )


def _encoder(spec: Mapping[str, Any]) -> Iterator[str]:
    """An encoder's sizes; those of an encoder of text are the model's, to whose positions they apply too."""
    args, texts = spec["args"], spec["name"] == "TextEncoder"
    yield f"model/encoder={'text' if texts else 'vit'}"
    yield f"model.size.encoder_depth={args['depth']}"
    if texts:
        yield "model/position=learned"
        yield from _sizes(args)
    yield from _plain("model.encoder", args, (*INJECTED, *(SIZES if texts else ())))


def _decoder(args: Mapping[str, Any], place: str) -> Iterator[str]:
    yield "model/position=learned"
    yield from _sizes(args)
    yield f"model.size.{'depth' if place == 'model' else 'decoder_depth'}={args['depth']}"
    if "prefix" in args:
        yield "model/fusion=prefix"
        yield from _plain(f"{place}.prefix", args["prefix"]["args"], ("dim", "context_dim"))
    if "vocabulary_head" in args:
        yield f"++{place}.vocabulary_head._target_=vlm.models.heads.VocabularyHead"
        yield from _plain(f"{place}.vocabulary_head", args["vocabulary_head"]["args"], ("vocab_size",))
    yield from _plain(place, args, (*INJECTED, *SIZES, "prefix", "vocabulary_head"))


def _sizes(args: Mapping[str, Any]) -> Iterator[str]:
    yield from (f"model.size.{name}={args[name]}" for name in SIZES)


def _plain(place: str, args: Mapping[str, Any], without: Sequence[str]) -> Iterator[str]:
    for name, value in args.items():
        if name not in without:
            yield f"++{place}.{name}={value if isinstance(value, str) else json.dumps(value)}"


def _preprocess(state: Mapping[str, Any]) -> Iterator[str]:
    yield f"data.image_size={state['image_size']}"
    yield from (f"++data.preprocess.{name}=[{','.join(map(str, state[name]))}]" for name in ("mean", "std"))
    yield from (f"++data.preprocess.{name}={state[name]}" for name in ("resize", "interpolation", "crop"))
