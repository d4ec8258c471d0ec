"""Converts image encoders of timm to our ViT, which Hugging Face has classes for."""

from typing import Any

import torch
from torch import Tensor, nn

from vlm.errors import UserError
from vlm.models.timm_encoder import TimmEncoder
from vlm.models.vit import ViT
from vlm.nn.blocks import ACTIVATIONS

UNREAD = ("attn_pool.", "fc_norm.", "head.")  # heads, which the features of an encoder do not depend on
TOLERANCE = 1e-3  # of features, in units of their standard deviation


def convert_timm_vit(encoder: TimmEncoder, key: str) -> ViT:
    """Returns a ViT that computes the features of a backbone of timm.

    Layer scales become a part of the weights. The features of both are compared for random images.

    Args:
        key: Key of the encoder in our config, for messages.
    Raises:
        UserError: It is not a plain ViT; the message names what it has.
    """
    from timm.models.vision_transformer import VisionTransformer

    backbone, kind = encoder.backbone, type(encoder.backbone)
    name = backbone.pretrained_cfg.get("architecture", kind.__name__)
    if kind is not VisionTransformer:
        raise _refuse(key, name, f"the class {kind.__name__}")
    block, patches = backbone.blocks[0], backbone.patch_embed
    activation = _find_activation(getattr(block.mlp, "act", nn.Identity()))
    if activation is None or not isinstance(norm := block.norm1, nn.LayerNorm) or len({*patches.patch_size}) > 1:
        raise _refuse(key, name, "an unusual norm, activation or patch size")
    state = _convert_state(backbone)
    with torch.device("meta"):
        vit = ViT(
            image_size=patches.img_size,
            patch_size=patches.patch_size[0],
            dim=backbone.embed_dim,
            depth=len(backbone.blocks),
            num_heads=block.attn.num_heads,
            mlp_ratio=block.mlp.fc1.out_features / backbone.embed_dim,
            activation=activation,
            norm_eps=norm.eps,
            qkv_bias="blocks.0.attn.qkv.bias" in state,
            patch_bias="patch_embed.bias" in state,
            class_token="class_token" in state,
            final_norm="norm.weight" in state,
        )
    ours = vit.state_dict()
    if unmatched := sorted({*state} ^ {*ours}):
        raise _refuse(key, name, unmatched[0])
    if different := next((name for name, tensor in ours.items() if tensor.shape != state[name].shape), None):
        raise _refuse(key, name, f"{different} of shape {tuple(state[different].shape)}")
    vit.load_state_dict(state, assign=True)
    if not _has_equal_features(vit.eval(), encoder):
        raise _refuse(key, name, "other computations than ViT")
    return vit


def _refuse(key: str, name: str, part: str) -> UserError:
    return UserError(
        f"{key}: {name} of timm has {part}, and transformers has a class for plain ViTs only; "
        "use --to safetensors or --to onnx"
    )


def _find_activation(layer: nn.Module) -> Any:
    """Returns the name of an activation in ours; None if it has none."""
    x = torch.linspace(-4, 4, 101)
    return next((name for name, ours in ACTIVATIONS.items() if torch.allclose(layer(x), ours(x), atol=1e-6)), None)


def _convert_state(backbone: Any) -> dict[str, Tensor]:
    """Returns the weights of a ViT of timm by our names, as far as we have them."""
    state = {name: tensor for name, tensor in backbone.state_dict().items() if not name.startswith(UNREAD)}
    for branch, layer in (("ls1.gamma", "attn.proj"), ("ls2.gamma", "mlp.fc2")):
        for prefix in [name.removesuffix(branch) for name in state if name.endswith(f".{branch}")]:
            scale = state.pop(f"{prefix}{branch}")
            state[f"{prefix}{layer}.weight"] = state[f"{prefix}{layer}.weight"] * scale[:, None]
            if (bias := f"{prefix}{layer}.bias") in state:
                state[bias] = state[bias] * scale
    renamed = {name.replace("patch_embed.proj.", "patch_embed."): tensor for name, tensor in state.items()}
    if "cls_token" in renamed:
        renamed["class_token"] = renamed.pop("cls_token").flatten()
    if "pos_embed" in renamed:
        positions = renamed.pop("pos_embed")[0]
        if "class_token" in renamed and backbone.no_embed_class:  # the class token has none
            positions = torch.cat([torch.zeros_like(positions[:1]), positions])
        renamed["positions.weight"] = positions
    return renamed


@torch.no_grad()
def _has_equal_features(vit: ViT, encoder: TimmEncoder) -> bool:
    height, width = encoder.backbone.patch_embed.img_size
    images = torch.randn(2, 3, height, width, generator=torch.Generator().manual_seed(0))
    was_training = encoder.training
    expected = encoder.eval().features(images)
    encoder.train(was_training)
    found = vit(images).states
    return found.shape == expected.shape and bool((found - expected).abs().max() <= TOLERANCE * expected.std())
