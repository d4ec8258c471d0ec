"""Overrides that configure training from a Hugging Face folder: `model=pretrained`."""

from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any, ClassVar

from vlm.checkpoint.locate import add_adapters, add_projector
from vlm.errors import UserError
from vlm.training.config.folder import (
    ADAPTERS_LR,
    ANSWER_TOKENS,
    BACKBONE,
    FULL_LR,
    JOINED_TASKS,
    NEW_DECODER_LR,
    PROMPT_LEN,
    argument_overrides,
    decoder_overrides,
    encoder_overrides,
    list_prompt_tasks,
    preprocess_overrides,
    prompt_field_overrides,
    read_folder,
)

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
# Tasks that add a new decoder to a folder that holds only an encoder, and their model config.
NEW_DECODER_TASKS, NEW_DECODER_MODEL = ("captioning", "image_questions"), "small"
JOIN_REMEDY = (
    "for texts about images, join an image encoder and a decoder of Llama's family: model=vision_language "
    "model.encoder.path=FOLDER model.decoder.path=FOLDER"
)


class PretrainedModel:
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
    yield from decoder_overrides(args, "model")
    yield f"model.max_len={args['max_len']}"
    yield from (
        "~task.fields.images",
        "task.fields.pairs._target_=vlm.data.text.preference_field.PreferencePromptField",
    )
    yield from (f"++task.fields.pairs.path={folder}", "++task.fields.pairs.preprocess=null")
    yield f"task.max_tokens={ANSWER_TOKENS}"


def _folder_overrides(path: str | None, choices: Mapping[str, str]) -> Iterator[str]:
    chosen_task = choices.get("task")
    folder, specified, about = read_folder(path, "model.path", images_only=chosen_task not in (None, "contrastive"))
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
        yield from encoder_overrides(encoder, has_decoder="decoder" in parts)
    if (texts := parts.get("text_encoder")) is not None:
        assert specified.model is not None  # a dual encoder
        args = texts["args"]
        yield f"model/encoder@model.text_encoder={'causal_text' if texts['name'] == 'Decoder' else 'one_text'}"
        yield "model.text_encoder.positions=null"  # learned ones of its own width
        # With text_fill, texts are padded to all of its positions.
        is_filled = specified.model["args"].get("text_fill") is not None
        determined = ("vocab_size",) if is_filled else ("vocab_size", "max_len")
        yield from argument_overrides("model.text_encoder", args, determined)
        yield f"data.max_len={min(MAX_CAPTION_TOKENS, args['max_len'])}"
    if (decoder := parts.get("decoder")) is not None:
        yield from decoder_overrides(decoder["args"], "model.decoder" if encoder else "model")
        if task in QUESTION_TASKS:
            most = MAX_CAPTION_TOKENS if task == "image_questions" else MAX_CONVERSATION_TOKENS
            yield f"data.max_len={min(most, decoder['args']['max_len'])}"
    elif specified.model is not None and same_task:
        yield from argument_overrides(
            "model", specified.model["args"], ("encoder", "text_encoder", "num_classes", "vocab_size")
        )
    elif task == "classification" and encoder is not None:
        yield f"model.pool={'class' if encoder['args'].get('class_token') else 'mean'}"
    elif task == "text_classification":
        yield "model.transform=true"
    if "preprocess" in about:
        yield from preprocess_overrides(about["preprocess"])


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
    yield from argument_overrides("model.projector", projector["args"], ("context_dim", "dim", "image_size"))
    yield from encoder_overrides(encoder["backbone"], BACKBONE)
    yield f"model.encoder.drop={encoder.get('drop', 0)}"
    yield from decoder_overrides(decoder, "model.decoder")
    yield f"model.decoder.max_len={decoder['max_len']}"
    yield from ("tokenizer=pretrained", f"tokenizer.path={folder}")
    yield from preprocess_overrides(about["preprocess"])
    yield from prompt_field_overrides(task, folder, about)


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
