"""Training that starts from Hugging Face folders: the overrides behind `model=pretrained` and `vision_language`."""

import json
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, ClassVar

from vlm.config.names import full
from vlm.errors import UserError
from vlm.nn.image_size import as_override

# For each task, the model config that takes a folder's stacks, and the class of its encoder.
MODELS = {
    "captioning": ("base", "ViT"),
    "classification": ("classifier_small", "ViT"),
    "contrastive": ("dual_small", "ViT"),
    "image_questions": ("small", "ViT"),
    "language_modeling": ("gpt2", None),
    "masked_language_modeling": ("masked_lm_small", "TextEncoder"),
    "text_classification": ("text_classifier_small", "TextEncoder"),
    "tagging": ("tagger_small", "TextEncoder"),
    "span_answering": ("span_answerer_small", "TextEncoder"),
    "translation": ("translator_small", None),
}
LONGEST = 64  # tokens of a caption
FRESH_DECODER = ("captioning", "image_questions")  # tasks for which a folder may hold only an encoder
CAPTIONER = "small"  # the model of these tasks, whose decoder starts fresh
JOINED = (
    "for texts about images, join an image encoder and a decoder of Llama's family: model=vision_language "
    "model.encoder.path=FOLDER model.decoder.path=FOLDER"
)
# Learning rates of AdamW: of whole models (Devlin et al. 2019, appendix A.3), of adapters (Hu et al. 2022, table 11),
# and of an encoder with a decoder that starts fresh (BLIP, Li et al. 2022).
WHOLE_LR, ADAPTERS_LR, FRESH_LR = "5e-5", "2e-4", "3e-4"
SIZES = ("dim", "num_heads", "mlp_ratio")  # set once, under model.size
INJECTED = ("image_size", "vocab_size", "max_len", "depth", "context_dim")  # set by the data, or elsewhere


class Pretrained:
    """Placeholder in a config for the model of a Hugging Face folder, its tokenizer and preprocessing.

    Args:
        path: The folder, or hf:ORG/NAME.
    """

    reads: ClassVar[tuple[str, ...]] = ("path",)

    def __init__(self, *, path: str) -> None:
        self.path = path

    @staticmethod
    def overrides(values: Mapping[str, Any], choices: Mapping[str, str]) -> list[str]:
        """Returns the overrides that describe a folder's model; the user's are applied after them.

        Args:
            values: Config values by the keys in `reads`.
            choices: The chosen option of each group.
        Raises:
            UserError: The folder cannot be used, or not for the task.
        """
        return list(_of_folder(values["path"], choices))


def described(place: str | None, key: str, *, images_only: bool = False) -> tuple[str, Any, dict[str, Any]]:
    """Returns the path of a folder, the specification of its model, and what a checkpoint holds besides weights.

    Args:
        key: Config key of the folder, for messages.
        images_only: See `describe_folder`.
    """
    if not place:
        raise UserError(f"{key}: has no value; give {key}=FOLDER")
    from vlm.checkpoint.hugging_face import describe_folder  # imports torch, before which `tune` must run
    from vlm.checkpoint.locate import fetched
    from vlm.models.pretrained.opened import opened

    folder = str(fetched(place))
    return folder, *describe_folder(opened(folder), images_only=images_only)


def _of_folder(place: str | None, choices: Mapping[str, str]) -> Iterator[str]:
    stated = choices.get("task")
    folder, specified, about = described(place, "model.path", images_only=stated not in (None, "contrastive"))
    from vlm.data.text.prompt_form import reads_images_inside_texts

    if reads_images_inside_texts(about):
        raise UserError(
            f"model.path={place}: a {about['origin']} is supported for inference only and cannot be fine-tuned; "
            f"{JOINED}"
        )
    task = stated or specified.task
    whole = task == specified.task
    parts = {place: part for place, part in specified.parts.items() if whole or place != "text_encoder"}
    _check(folder, task, specified, about["origin"])
    fresh = task in FRESH_DECODER and "decoder" not in parts
    yield from (f"task={task}", f"model={CAPTIONER if fresh else MODELS[str(task)][0]}", f"model.init_from={place}")
    if "optim" not in choices:
        rate = ADAPTERS_LR if choices.get("model/adapt") else FRESH_LR if fresh else WHOLE_LR
        yield from ("optim=adamw", f"optim.lr={rate}")
    if "tokenizer" in about:
        yield from ("tokenizer=pretrained", f"tokenizer.path={folder}")
    if (encoder := parts.get("encoder")) is not None:
        yield from of_encoder(encoder, alone="decoder" not in parts)
    if (texts := parts.get("text_encoder")) is not None:
        yield from _of_text_encoder(texts["name"], texts["args"], specified.model)
    if (decoder := parts.get("decoder")) is not None:
        yield from of_decoder(decoder["args"], "model.decoder" if encoder else "model")
    elif specified.model is not None and whole:
        yield from _plain("model", specified.model["args"], ("encoder", "text_encoder", "num_classes", "vocab_size"))
    elif task == "classification" and encoder is not None:
        yield f"model.pool={'class' if encoder['args'].get('class_token') else 'mean'}"
    elif task == "text_classification":
        yield "model.transform=true"
    if "preprocess" in about:
        yield from of_preprocess(about["preprocess"])


def _check(folder: str, task: str | None, specified: Any, origin: str) -> None:
    """Raises a UserError with the tasks that a folder can be trained for, unless `task` is one of them."""
    encoder = specified.parts.get("encoder")
    alone = encoder is not None and specified.parts.keys() - {"text_encoder"} == {"encoder"}
    fit = [name for name, (_, kind) in MODELS.items() if alone and kind == encoder["name"] and name != specified.task]
    fit = ([specified.task] if specified.task in MODELS else []) + fit
    if task in fit:
        return
    if encoder is not None and encoder["name"] == "TimmEncoder":
        raise UserError(
            f"model.path={folder}: a {origin} of timm; choose model/encoder=timm model.encoder.name={origin} "
            f"model.encoder.weights={folder}/model.safetensors"
        )
    fault = "has no task of its own" if task is None else f"cannot be trained for task={task}"
    known = f"choose task={' or task='.join(fit)}" if fit else "choose another folder"
    more = f"; {JOINED}" if task in ("image_questions", "conversations") else ""
    raise UserError(f"model.path={folder}: a {origin} {fault}; {known}{more}")


def of_encoder(spec: Mapping[str, Any], place: str = "model.encoder", *, alone: bool = True) -> Iterator[str]:
    """Yields the overrides of an encoder. A text encoder without a decoder sets model.size, which its positions use."""
    args, texts = spec["args"], spec["name"] == "TextEncoder"
    yield f"model/encoder{'' if place == 'model.encoder' else f'@{place}'}={'text' if texts else 'vit'}"
    yield f"model.size.encoder_depth={args['depth']}"
    if texts:
        yield from _sizes(args) if alone else _positions(place, args)
        yield "model/position=learned"
    yield from _plain(place, args, (*INJECTED, "positions", *(SIZES if texts and alone else ())))


def _of_text_encoder(name: str, args: Mapping[str, Any], model: Any) -> Iterator[str]:
    """Yields the overrides of a dual model's text encoder. With text_fill, texts take all of its positions."""
    yield f"model/encoder@model.text_encoder={'causal_text' if name == 'Decoder' else 'one_text'}"
    yield "model.text_encoder.positions=null"  # learned ones of its own width
    filled = model["args"].get("text_fill") is not None
    yield from _plain("model.text_encoder", args, ("vocab_size",) if filled else ("vocab_size", "max_len"))
    yield f"data.max_len={min(LONGEST, args['max_len'])}"


def of_decoder(args: Mapping[str, Any], place: str) -> Iterator[str]:
    """Yields the overrides for a decoder's sizes, positions and fusion."""
    positions = args.get("positions") or {"name": None}
    rotary = positions["name"] == "RotaryPositions"
    yield f"model/position={'rotary' if rotary else 'learned'}"
    if rotary:
        yield from _plain("model.position", positions["args"], ("head_dim",))
        yield f"model.position.head_dim={positions['args']['head_dim']}"
    else:
        yield from _positions(place, args)
    yield from _sizes(args)
    yield f"model.size.{'depth' if place == 'model' else 'decoder_depth'}={args['depth']}"
    if "prefix" in args:
        yield "model/fusion=prefix"
        yield from _plain("model.fusion", args["prefix"]["args"], ("dim", "context_dim"))
    if "vocabulary_head" in args:
        yield f"++{place}.vocabulary_head._target_=vlm.models.heads.VocabularyHead"
        yield from _plain(f"{place}.vocabulary_head", args["vocabulary_head"]["args"], ("vocab_size",))
    yield from _plain(place, args, (*INJECTED, *SIZES, "prefix", "vocabulary_head", "positions"))


def _positions(place: str, args: Mapping[str, Any]) -> Iterator[str]:
    """Yields the overrides that give a stack its own positions."""
    if (positions := args.get("positions")) is not None:
        args = {"_target_": full(positions["name"]), **positions["args"]}
        yield f"{place}.positions=null"  # else they are those of model.position
        yield f"++{place}.positions={{{','.join(f'{name}:{json.dumps(one)}' for name, one in args.items())}}}"


def _sizes(args: Mapping[str, Any]) -> Iterator[str]:
    yield from (f"model.size.{name}={args[name]}" for name in SIZES if name in args)


def _plain(place: str, args: Mapping[str, Any], without: Sequence[str]) -> Iterator[str]:
    for name, value in args.items():
        if name not in without:
            yield f"++{place}.{name}={value if isinstance(value, str) else json.dumps(value)}"


def of_preprocess(state: Mapping[str, Any]) -> Iterator[str]:
    """Yields the overrides for the preprocessing of images."""
    yield f"data.image_size={as_override(state['image_size'])}"
    yield from (f"++data.preprocess.{name}=[{','.join(map(str, state[name]))}]" for name in ("mean", "std"))
    yield from (f"++data.preprocess.{name}={state[name]}" for name in ("resize", "interpolation", "crop"))


TASKS = ("captioning", "conversations", "image_questions")
BACKBONE = "model.encoder.backbone"


class Joined:
    """Placeholder in a config for an encoder and a decoder joined by a fresh projector, with the decoder's tokenizer.

    Args:
        encoder: `path` of a folder; or `name` and `weights` of a timm backbone.
        decoder: `path` of a folder or a GGUF file.
        init_from: Checkpoint of an earlier stage, whose weights replace those of both.
    """

    reads: ClassVar[tuple[str, ...]] = ("encoder.path", "encoder.name", "encoder.weights", "decoder.path", "init_from")

    def __init__(self, *, encoder: dict[str, Any], decoder: dict[str, Any], init_from: str | None = None) -> None:
        self.encoder, self.decoder, self.init_from = encoder, decoder, init_from

    @staticmethod
    def overrides(values: Mapping[str, Any], choices: Mapping[str, str]) -> list[str]:
        """Returns the overrides that describe the joined model; the user's are applied after them.

        Args:
            values: Config values by the keys in `reads`.
            choices: The chosen option of each group.
        Raises:
            UserError: A part cannot be used, or not for the task.
        """
        return list(_joined(values, choices))


def _joined(values: Mapping[str, Any], choices: Mapping[str, str]) -> Iterator[str]:
    if (task := choices.get("task") or TASKS[0]) not in TASKS:
        raise UserError(f"model=vision_language: is not for task={task}; choose {', '.join(TASKS)}")
    if (values["encoder.path"] is None) == (values["encoder.name"] is None):
        raise UserError("model.encoder.path: give the encoder's folder, or a backbone of timm by model.encoder.name")
    yield from (f"task={task}", "model=projected", "model/encoder=projected", "model/fusion=prefix")
    yield from ("model.fusion.counted=true", "model.fusion.causal=true")
    if "optim" not in choices:
        yield from ("optim=adamw", f"optim.lr={ADAPTERS_LR if choices.get('model/adapt') else WHOLE_LR}")
    fresh = values["init_from"] is None
    if not fresh:
        yield f"model.init_from={values['init_from']}"
    yield from _encoder(values, fresh=fresh)
    yield from _decoder(values["decoder.path"], fresh=fresh)


def _encoder(values: Mapping[str, Any], *, fresh: bool) -> Iterator[str]:
    if (place := values["encoder.path"]) is None:
        yield from _timm_backbone(values["encoder.name"])
        if values["encoder.weights"] is not None:
            yield f"{BACKBONE}.weights={values['encoder.weights']}"
        return
    _, specified, about = described(place, "model.encoder.path", images_only=True)
    encoder = specified.parts.get("encoder")
    if (
        specified.parts.keys() - {"text_encoder"} != {"encoder"}
        or encoder is None
        or encoder["name"] not in ("ViT", "TimmEncoder")
    ):
        raise UserError(f"model.encoder.path={place}: holds a {about['origin']}; give a folder of an encoder of images")
    args = encoder["args"]
    if encoder["name"] == "TimmEncoder":
        yield from _timm_backbone(args["name"])
    else:
        yield from of_encoder(encoder, BACKBONE)
        yield f"model.encoder.drop={sum(bool(args.get(name)) for name in ('class_token', 'distillation_token'))}"
    yield from of_preprocess(about["preprocess"])
    if fresh:
        yield f"{BACKBONE}.init_from={place}"


def _timm_backbone(name: str) -> Iterator[str]:
    """Yields the overrides for a timm backbone, whose features go to the projector unchanged."""
    import torch

    from vlm.models.timm_encoder import TimmEncoder

    with torch.device("meta"), torch.no_grad():  # for its width
        encoder = TimmEncoder(name=name, dim=None, image_size=224)
    yield from (f"model/encoder@{BACKBONE}=timm", f"{BACKBONE}.name={name}", f"{BACKBONE}.dim=null")
    yield f"model.projector.context_dim={encoder.dim}"
    yield f"model.encoder.drop={getattr(encoder.backbone, 'num_prefix_tokens', 0)}"


def _decoder(place: str | None, *, fresh: bool) -> Iterator[str]:
    folder, specified, about = described(place, "model.decoder.path")
    decoder = specified.parts.get("decoder")
    if specified.parts.keys() != {"decoder"} or decoder is None or "positions" not in decoder["args"]:
        raise UserError(f"model.decoder.path={place}: holds a {about['origin']}; give a decoder of Llama's family")
    yield from of_decoder(decoder["args"], "model.decoder")
    # Chats are longer than the texts of training, and rotary positions need no table.
    yield f"model.decoder.max_len={decoder['args']['max_len']}"
    yield from ("tokenizer=pretrained", f"tokenizer.path={folder}")
    if fresh:
        yield f"model.decoder.init_from={place}"
