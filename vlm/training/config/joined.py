"""Overrides that join an encoder of images and a decoder by a new projector: `model=vision_language`."""

from collections.abc import Iterator, Mapping
from typing import Any, ClassVar, Literal

from vlm.errors import UserError
from vlm.training.config.folder import (
    ADAPTERS_LR,
    BACKBONE,
    FULL_LR,
    JOINED_TASKS,
    decoder_overrides,
    encoder_overrides,
    preprocess_overrides,
    prompt_field_overrides,
    read_folder,
)


class JoinedModel:
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
    _, specified, about = read_folder(path, "model.encoder.path", images_only=True)
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
        yield from encoder_overrides(encoder, BACKBONE)
        yield f"model.encoder.drop={sum(bool(args.get(name)) for name in ('class_token', 'distillation_token'))}"
    yield from preprocess_overrides(about["preprocess"])
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
    folder, specified, about = read_folder(path, "model.decoder.path")
    decoder = specified.parts.get("decoder")
    if specified.parts.keys() != {"decoder"} or decoder is None or "positions" not in decoder["args"]:
        raise UserError(f"model.decoder.path={path}: holds a {about['origin']}; give a decoder of Llama's family")
    yield from decoder_overrides(decoder["args"], "model.decoder")
    # Chats are longer than the texts of training, and rotary positions need no table.
    yield f"model.decoder.max_len={decoder['args']['max_len']}"
    yield from ("tokenizer=pretrained", f"tokenizer.path={folder}")
    if first_stage:
        yield f"model.decoder.init_from={path}"
    if template == "auto" and "form" in about:
        yield from prompt_field_overrides(task, folder, about)
