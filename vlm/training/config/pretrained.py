"""Overrides that configure training from Hugging Face folders: `model=pretrained` and `model=vision_language`."""

import json
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, ClassVar, Literal

from vlm.checkpoint.locate import add_adapters, add_projector
from vlm.config.target import expand_name
from vlm.errors import UserError
from vlm.nn.image_size import as_override

if TYPE_CHECKING:
    from vlm.checkpoint.stored import Metadata
    from vlm.models.pretrained.folder import FolderSpecification

# For each task: the model config to use, and the encoder class of a folder that may hold only an encoder.
MODELS = {
    "captioning": ("base", "ViT"),
    "conversations": ("small", None),
    "preferences": ("small", None),
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
# Of captioners too, whose decoder then also reads questions.
QUESTION_TASKS = ("image_questions", "conversations", "preferences")
MAX_CAPTION_TOKENS, MAX_CONVERSATION_TOKENS = 64, 512
NEW_DECODER_TASKS = (
    "captioning",
    "image_questions",
)  # tasks that add a new decoder to a folder that holds only an encoder
NEW_DECODER_MODEL = "small"  # model config of these tasks
JOIN_REMEDY = (
    "for texts about images, join an image encoder and a decoder of Llama's family: model=vision_language "
    "model.encoder.path=FOLDER model.decoder.path=FOLDER"
)
# AdamW's learning rates: for all weights (Devlin et al. 2019, appendix A.3), for adapters (Hu et al. 2022, table 11),
# and for a pretrained encoder with a new decoder (BLIP, Li et al. 2022).
FULL_LR, ADAPTERS_LR, NEW_DECODER_LR = "5e-5", "2e-4", "3e-4"
SIZES = ("dim", "num_heads", "mlp_ratio")  # set under model.size, which all parts share
INJECTED = ("image_size", "vocab_size", "max_len", "depth", "context_dim")  # determined by the data or by other keys


class Pretrained:
    """Placeholder in a config for the model of a Hugging Face folder, its tokenizer and preprocessing.

    Args:
        path: The folder, a GGUF file, or hf:ORG/NAME.
        mmproj: Image encoder of a GGUF file.
        adapters: Folder of adapters of the peft library, which are merged into the weights before training.
    """

    reads: ClassVar[tuple[str, ...]] = ("path", "mmproj", "adapters")

    def __init__(self, *, path: str, mmproj: str | None = None, adapters: str | None = None) -> None:
        self.path, self.mmproj, self.adapters = path, mmproj, adapters

    @staticmethod
    def overrides(values: Mapping[str, Any], choices: Mapping[str, str]) -> list[str]:
        """Returns the overrides that describe a folder's model. The user's overrides are applied after them.

        Args:
            values: Config values by the keys in `reads`.
            choices: The chosen option of each group.
        Raises:
            UserError: The folder cannot be used for the task.
        """
        path = values["path"]
        if path:
            path = add_projector(path, values.get("mmproj"), key="model.mmproj=")
            path = add_adapters(path, values.get("adapters"), key="model.adapters=")
        return list(_folder_overrides(path, choices))


def _chat_model_overrides(
    path: str, folder: str, specified: "FolderSpecification", choices: Mapping[str, str]
) -> Iterator[str]:
    """Yields the overrides to train a model that reads texts only, with a chat template, on preferences."""
    args = specified.parts["decoder"]["args"]
    yield from ("task=preferences", "model=gpt2", f"model.init_from={path}")
    if "optim" not in choices:
        yield from ("optim=adamw", f"optim.lr={ADAPTERS_LR if choices.get('model/adapt') else FULL_LR}")
    yield from ("tokenizer=pretrained", f"tokenizer.path={folder}", f"data.max_len={min(PROMPT_LEN, args['max_len'])}")
    yield from _decoder_overrides(args, "model")
    yield f"model.max_len={args['max_len']}"
    yield from (
        "~task.fields.images",
        "task.fields.pairs._target_=vlm.data.text.preference_field.PreferencePromptField",
    )
    yield from (f"++task.fields.pairs.path={folder}", "++task.fields.pairs.preprocess=null")
    yield f"task.max_tokens={ANSWER_TOKENS}"


def _read_folder(
    path: str | None, key: str, *, images_only: bool = False
) -> "tuple[str, FolderSpecification, Metadata]":
    """Returns the path of a folder, its model specification, and the metadata that a checkpoint stores.

    Args:
        key: Config key of the folder, for messages.
        images_only: See `describe_folder`.
    """
    if not path:
        raise UserError(f"{key}: missing; give {key}=FOLDER")
    from vlm.checkpoint.hugging_face import describe_folder  # imports torch, before which `tune` must run
    from vlm.checkpoint.locate import download
    from vlm.models.pretrained.load import open_folder

    folder = str(download(path))
    return folder, *describe_folder(open_folder(folder), images_only=images_only)


def _folder_overrides(path: str | None, choices: Mapping[str, str]) -> Iterator[str]:
    chosen_task = choices.get("task")
    folder, specified, about = _read_folder(path, "model.path", images_only=chosen_task not in (None, "contrastive"))
    from vlm.data.text.prompt_form import reads_images_inside_texts

    if reads_images_inside_texts(about):
        yield from _vision_language_overrides(str(path), folder, about, choices)
        return
    task = chosen_task or specified.task
    if task == "preferences" and specified.task == "language_modeling" and "form" in about:
        yield from _chat_model_overrides(str(path), folder, specified, choices)
        return
    same_task = task == specified.task
    parts = {name: part for name, part in specified.parts.items() if same_task or name != "text_encoder"}
    _check_task(folder, task, specified, about["origin"], has_template="form" in about)
    has_new_decoder = task in NEW_DECODER_TASKS and "decoder" not in parts
    yield from (
        f"task={task}",
        f"model={NEW_DECODER_MODEL if has_new_decoder else MODELS[str(task)][0]}",
        f"model.init_from={path}",
    )
    if "optim" not in choices:
        rate = ADAPTERS_LR if choices.get("model/adapt") else NEW_DECODER_LR if has_new_decoder else FULL_LR
        yield from ("optim=adamw", f"optim.lr={rate}")
    if "tokenizer" in about:
        yield from ("tokenizer=pretrained", f"tokenizer.path={folder}")
    if (encoder := parts.get("encoder")) is not None:
        yield from _encoder_overrides(encoder, has_decoder="decoder" in parts)
    if (texts := parts.get("text_encoder")) is not None:
        assert specified.model is not None  # a dual encoder
        args = texts["args"]
        yield f"model/encoder@model.text_encoder={'causal_text' if texts['name'] == 'Decoder' else 'one_text'}"
        yield "model.text_encoder.positions=null"  # learned ones of its own width
        # With text_fill, texts are padded to all of its positions.
        is_filled = specified.model["args"].get("text_fill") is not None
        determined = ("vocab_size",) if is_filled else ("vocab_size", "max_len")
        yield from _argument_overrides("model.text_encoder", args, determined)
        yield f"data.max_len={min(MAX_CAPTION_TOKENS, args['max_len'])}"
    if (decoder := parts.get("decoder")) is not None:
        yield from _decoder_overrides(decoder["args"], "model.decoder" if encoder else "model")
        if task in QUESTION_TASKS:
            most = MAX_CAPTION_TOKENS if task == "image_questions" else MAX_CONVERSATION_TOKENS
            yield f"data.max_len={min(most, decoder['args']['max_len'])}"
    elif specified.model is not None and same_task:
        yield from _argument_overrides(
            "model", specified.model["args"], ("encoder", "text_encoder", "num_classes", "vocab_size")
        )
    elif task == "classification" and encoder is not None:
        yield f"model.pool={'class' if encoder['args'].get('class_token') else 'mean'}"
    elif task == "text_classification":
        yield "model.transform=true"
    if "preprocess" in about:
        yield from _preprocess_overrides(about["preprocess"])


CAPTION_TOKENS, ANSWER_TOKENS = 64, 128  # default lengths of texts that evaluations decode
PROMPT_LEN = 2048  # default maximum number of tokens of a training row, with the states of images


def _vision_language_overrides(path: str, folder: str, about: "Metadata", choices: Mapping[str, str]) -> Iterator[str]:
    """Yields the overrides for a model that reads images inside its texts (SmolVLM, LLaVA, PaliGemma)."""
    spec = about["model"]
    assert spec is not None
    encoder, decoder = spec["args"]["encoder"]["args"], spec["args"]["decoder"]["args"]
    tasks = list_prompt_tasks(about)
    if (task := choices.get("task") or JOINED_TASKS[0]) not in tasks:
        boxes = "; boxes are answers of task=image_questions there (docs/detection.md)" if task == "detection" else ""
        raise UserError(
            f"model.path={path}: a {about['origin']} cannot be trained for task={task}; "
            f"choose task={' or task='.join(tasks)}{boxes}"
        )
    yield from (f"task={task}", "model=projected", "model/encoder=projected", "model/fusion=prefix")
    yield f"model.init_from={path}"
    if "optim" not in choices:
        yield from ("optim=adamw", f"optim.lr={ADAPTERS_LR if choices.get('model/adapt') else FULL_LR}")
    projector = encoder["projector"]
    yield f"model/projector={'mlp' if projector['name'] == 'MLPProjector' else 'linear'}"
    yield from _argument_overrides("model.projector", projector["args"], ("context_dim", "dim", "image_size"))
    yield from _encoder_overrides(encoder["backbone"], BACKBONE)
    yield f"model.encoder.drop={encoder.get('drop', 0)}"
    yield from _decoder_overrides(decoder, "model.decoder")
    yield f"model.decoder.max_len={decoder['max_len']}"
    yield from ("tokenizer=pretrained", f"tokenizer.path={folder}")
    yield from _preprocess_overrides(about["preprocess"])
    yield from prompt_field_overrides(task, folder, about)


def list_prompt_tasks(about: "Metadata") -> tuple[str, ...]:
    """Returns the tasks of a model that reads images inside its texts; without causal attention, those of one turn."""
    assert about["model"] is not None
    is_causal = about["model"]["args"]["decoder"]["args"]["prefix"]["args"]["causal"]
    return JOINED_TASKS if is_causal else tuple(task for task in JOINED_TASKS if task != "conversations")


PROMPT_FIELDS = {  # name and class of the field of texts
    "captioning": ("captions", "prompt_field.CaptionPromptField"),
    "preferences": ("pairs", "preference_field.PreferencePromptField"),
}


def prompt_field_overrides(task: str, folder: str, about: "Metadata") -> Iterator[str]:
    """Yields the overrides for fields that read images inside texts, and for the lengths of texts.

    Args:
        folder: The folder that has the form of prompts.
        about: Its metadata, as a checkpoint stores them. If its model reads only texts, the number of states of an
            image is determined by the encoder that is joined to it.
    """
    is_captioning = task == "captioning"
    name, kind = PROMPT_FIELDS.get(task, ("questions", "prompt_field.QuestionPromptField"))
    yield "task.fields.images._target_=vlm.data.fields.ImageViewsField"
    yield f"task.fields.{name}._target_=vlm.data.text.{kind}"
    yield f"++task.fields.{name}.path={folder}"
    yield f"++task.fields.{name}.states={about['form']['states'] or 'null'}"
    yield f"++task.fields.{name}.preprocess=${{data.preprocess}}"
    yield f"++task.fields.{name}.prompt=null"
    if task == "conversations":
        yield f"~task.fields.{name}.bins"  # the folder's tokenizer has its own tokens
    assert about["model"] is not None
    model_args = about["model"]["args"]
    decoder_args = model_args["decoder"]["args"] if "decoder" in model_args else model_args
    yield f"data.max_len={min(PROMPT_LEN, decoder_args['max_len'])}"
    yield "data.augment=null"
    yield f"task.max_tokens={CAPTION_TOKENS if is_captioning else ANSWER_TOKENS}"


def _check_task(
    folder: str, task: str | None, specified: "FolderSpecification", origin: str, *, has_template: bool
) -> None:
    """Raises a UserError with the tasks that a folder can be trained for, unless `task` is one of them.

    Args:
        has_template: Whether it has a chat template.
    """
    encoder = specified.parts.get("encoder")
    only_encoder = encoder is not None and specified.parts.keys() - {"text_encoder"} == {"encoder"}
    trainable = [
        name
        for name, (_, kind) in MODELS.items()
        if only_encoder and encoder is not None and kind == encoder["name"] and name != specified.task
    ]
    trainable = ([specified.task] if specified.task in MODELS else []) + trainable
    if has_template and specified.task == "language_modeling":
        trainable.append("preferences")
    if specified.task == "captioning" and "decoder" in specified.parts:
        trainable += QUESTION_TASKS
    if task in trainable:
        return
    if encoder is not None and encoder["name"] == "TimmEncoder":
        raise UserError(
            f"model.path={folder}: is a timm model ({origin}); use model/encoder=timm model.encoder.name={origin} "
            f"model.encoder.weights={folder}/model.safetensors"
        )
    fault = "does not determine a task" if task is None else f"cannot be trained for task={task}"
    choice = f"choose task={' or task='.join(trainable)}" if trainable else "choose another folder"
    joined = f"; {JOIN_REMEDY}" if task in ("image_questions", "conversations") else ""
    raise UserError(f"model.path={folder}: a {origin} {fault}; {choice}{joined}")


def _encoder_overrides(
    spec: Mapping[str, Any], place: str = "model.encoder", *, has_decoder: bool = False
) -> Iterator[str]:
    """Yields the overrides of an encoder. A text encoder without a decoder sets model.size, which its positions use."""
    args, is_text = spec["args"], spec["name"] == "TextEncoder"
    yield f"model/encoder{'' if place == 'model.encoder' else f'@{place}'}={'text' if is_text else 'vit'}"
    yield f"model.size.encoder_depth={args['depth']}"
    if is_text:
        yield from _position_overrides(place, args) if has_decoder else _size_overrides(args)
        yield "model/position=learned"
    elif (positions := args.get("positions")) is not None:
        yield _node_override(f"{place}.positions", positions)
    yield from _argument_overrides(
        place, args, (*INJECTED, "positions", *(SIZES if is_text and not has_decoder else ()))
    )


def _decoder_overrides(args: Mapping[str, Any], place: str) -> Iterator[str]:
    """Yields the overrides for a decoder's sizes, positions and fusion."""
    positions = args.get("positions") or {"name": None}
    rotary = positions["name"] == "RotaryPositions"
    yield f"model/position={'rotary' if rotary else 'learned'}"
    if rotary:
        yield from _argument_overrides("model.position", positions["args"], ("head_dim",))
        yield f"model.position.head_dim={positions['args']['head_dim']}"
    else:
        yield from _position_overrides(place, args)
    yield from _size_overrides(args)
    yield f"model.size.{'depth' if place == 'model' else 'decoder_depth'}={args['depth']}"
    if "prefix" in args:
        yield "model/fusion=prefix"
        yield from _argument_overrides("model.fusion", args["prefix"]["args"], ("dim", "context_dim"))
    if "vocabulary_head" in args:
        yield f"++{place}.vocabulary_head._target_=vlm.models.heads.VocabularyHead"
        yield from _argument_overrides(f"{place}.vocabulary_head", args["vocabulary_head"]["args"], ("vocab_size",))
    yield from _argument_overrides(place, args, (*INJECTED, *SIZES, "prefix", "vocabulary_head", "positions"))


def _position_overrides(place: str, args: Mapping[str, Any]) -> Iterator[str]:
    """Yields the overrides that give a stack separate positions."""
    if (positions := args.get("positions")) is not None:
        yield f"{place}.positions=null"  # instead of model.position
        yield _node_override(f"{place}.positions", positions)


def _node_override(key: str, spec: Mapping[str, Any]) -> str:
    """Returns the override that sets a key to a class with its arguments."""
    args = {"_target_": expand_name(spec["name"]), **spec["args"]}
    return f"++{key}={{{','.join(f'{name}:{json.dumps(value)}' for name, value in args.items())}}}"


def _size_overrides(args: Mapping[str, Any]) -> Iterator[str]:
    yield from (f"model.size.{name}={args[name]}" for name in SIZES if name in args)


def _argument_overrides(place: str, args: Mapping[str, Any], without: Sequence[str]) -> Iterator[str]:
    for name, value in args.items():
        if name not in without:
            yield f"++{place}.{name}={value if isinstance(value, str) else json.dumps(value)}"


def _preprocess_overrides(state: Mapping[str, Any]) -> Iterator[str]:
    """Yields the overrides for the preprocessing of images."""
    yield f"data.image_size={as_override(state['image_size'])}"
    yield from (f"++data.preprocess.{name}=[{','.join(map(str, state[name]))}]" for name in ("mean", "std"))
    names = ("resize", "interpolation", "crop", "longest_edge", "tiles")
    yield from (f"++data.preprocess.{name}={state[name]}" for name in names if name in state)


JOINED_TASKS = ("captioning", "conversations", "image_questions", "preferences")
BACKBONE = "model.encoder.backbone"


class Joined:
    """Placeholder in a config for an encoder and a decoder joined by a new projector, with the decoder's tokenizer.

    Args:
        encoder: `path` of a folder; or `name` and `weights` of a timm backbone.
        decoder: `path` of a folder or a GGUF file.
        chat_template: "auto" for prompts in the form of the decoder's chat template, if it has one; "none" for our own
            form, with images before the text.
        init_from: Checkpoint of an earlier training stage, whose weights replace those of both.
    """

    reads: ClassVar[tuple[str, ...]] = (
        "encoder.path",
        "encoder.name",
        "encoder.weights",
        "decoder.path",
        "chat_template",
        "init_from",
    )

    def __init__(
        self,
        *,
        encoder: dict[str, Any],
        decoder: dict[str, Any],
        chat_template: Literal["auto", "none"] = "auto",
        init_from: str | None = None,
    ) -> None:
        self.encoder, self.decoder, self.chat_template, self.init_from = encoder, decoder, chat_template, init_from

    @staticmethod
    def overrides(values: Mapping[str, Any], choices: Mapping[str, str]) -> list[str]:
        """Returns the overrides that describe the joined model. The user's overrides are applied after them.

        Args:
            values: Config values by the keys in `reads`.
            choices: The chosen option of each group.
        Raises:
            UserError: A folder cannot be used for the task.
        """
        return list(_joined_overrides(values, choices))


def _joined_overrides(values: Mapping[str, Any], choices: Mapping[str, str]) -> Iterator[str]:
    if (task := choices.get("task") or JOINED_TASKS[0]) not in JOINED_TASKS:
        raise UserError(f"model=vision_language: does not support task={task}; choose {', '.join(JOINED_TASKS)}")
    if (values["encoder.path"] is None) == (values["encoder.name"] is None):
        raise UserError(
            "model.encoder.path: give either the encoder's folder, or a timm backbone as model.encoder.name"
        )
    yield from (f"task={task}", "model=projected", "model/encoder=projected", "model/fusion=prefix")
    yield from ("model.fusion.counted=true", "model.fusion.causal=true")
    if "optim" not in choices:
        yield from ("optim=adamw", f"optim.lr={ADAPTERS_LR if choices.get('model/adapt') else FULL_LR}")
    first_stage = values["init_from"] is None
    if not first_stage:
        yield f"model.init_from={values['init_from']}"
    yield from _joined_encoder_overrides(values, first_stage=first_stage)
    yield from _joined_decoder_overrides(values, task, first_stage=first_stage)


def _joined_encoder_overrides(values: Mapping[str, Any], *, first_stage: bool) -> Iterator[str]:
    if (path := values["encoder.path"]) is None:
        yield from _timm_overrides(values["encoder.name"])
        if values["encoder.weights"] is not None:
            yield f"{BACKBONE}.weights={values['encoder.weights']}"
        return
    _, specified, about = _read_folder(path, "model.encoder.path", images_only=True)
    encoder = specified.parts.get("encoder")
    if (
        specified.parts.keys() - {"text_encoder"} != {"encoder"}
        or encoder is None
        or encoder["name"] not in ("ViT", "TimmEncoder")
    ):
        raise UserError(f"model.encoder.path={path}: holds a {about['origin']}; give a folder of an image encoder")
    args = encoder["args"]
    if encoder["name"] == "TimmEncoder":
        yield from _timm_overrides(args["name"])
    else:
        yield from _encoder_overrides(encoder, BACKBONE)
        yield f"model.encoder.drop={sum(bool(args.get(name)) for name in ('class_token', 'distillation_token'))}"
    yield from _preprocess_overrides(about["preprocess"])
    if first_stage:
        yield f"{BACKBONE}.init_from={path}"


def _timm_overrides(name: str) -> Iterator[str]:
    """Yields the overrides for a timm backbone, whose features go to the projector unchanged."""
    import torch

    from vlm.models.timm_encoder import TimmEncoder

    with torch.device("meta"), torch.no_grad():  # for its width
        encoder = TimmEncoder(name=name, dim=None, image_size=224)
    yield from (f"model/encoder@{BACKBONE}=timm", f"{BACKBONE}.name={name}", f"{BACKBONE}.dim=null")
    yield f"model.projector.context_dim={encoder.dim}"
    yield f"model.encoder.drop={getattr(encoder.backbone, 'num_prefix_tokens', 0)}"


def _joined_decoder_overrides(values: Mapping[str, Any], task: str, *, first_stage: bool) -> Iterator[str]:
    path, template = values["decoder.path"], values["chat_template"]
    if template not in ("auto", "none"):
        raise UserError(f"model.chat_template={template}: choose auto or none")
    folder, specified, about = _read_folder(path, "model.decoder.path")
    decoder = specified.parts.get("decoder")
    if specified.parts.keys() != {"decoder"} or decoder is None or "positions" not in decoder["args"]:
        raise UserError(f"model.decoder.path={path}: holds a {about['origin']}; give a decoder of Llama's family")
    yield from _decoder_overrides(decoder["args"], "model.decoder")
    # Chats are longer than the texts of training, and rotary positions need no table.
    yield f"model.decoder.max_len={decoder['args']['max_len']}"
    yield from ("tokenizer=pretrained", f"tokenizer.path={folder}")
    if first_stage:
        yield f"model.decoder.init_from={path}"
    if template == "auto" and "form" in about:
        yield from prompt_field_overrides(task, folder, about)
