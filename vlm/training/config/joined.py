"""Training of a pretrained encoder joined with a pretrained decoder: the overrides behind `model=vision_language`."""

from collections.abc import Iterator, Mapping
from typing import Any, ClassVar

from vlm.errors import UserError
from vlm.training.config.pretrained import ADAPTERS_LR, WHOLE_LR, described, of_decoder, of_encoder, of_preprocess

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
