"""PaliGemma (Beyer et al. 2024): SigLIP's encoder, and a Gemma whose attention in the prompt is bidirectional."""

from dataclasses import replace
from typing import Any

from vlm.models.pretrained.architecture import IMAGE, Architecture, ImageText, Model, Spec, spec_of
from vlm.models.pretrained.architectures.gemma import GEMMA
from vlm.models.pretrained.architectures.llava import NEUTRAL_KEYS, RENAMED, TEXT, VISION, head, inside, stack_of
from vlm.models.pretrained.architectures.siglip_vision_model import SIGLIP_VISION
from vlm.models.pretrained.fields import Fields, flag
from vlm.models.pretrained.stack import Part

BOTH = "use_bidirectional_attention"
GEMMA_TEXT = replace(GEMMA, needed={"attention_bias": False, BOTH: True})


def paligemma_text(config: Fields) -> Part:
    """The decoder's part.

    Raises:
        UserError: It is not a Gemma, for example in PaliGemma 2.
    """
    inner = config.part("text_config")
    stated = inner if BOTH in inner else inner | {BOTH: True}
    tied = flag("tie_word_embeddings", True)
    stack_of(inner, GEMMA)
    return Part(GEMMA_TEXT, stated | {tied.name: config.read(tied)}, TEXT)


def linear(config: Fields, widths: dict[str, Any]) -> Spec:
    return spec_of("LinearProjector", **widths)


PALIGEMMA_ARCHITECTURE = Architecture(
    parts=lambda config: {
        "encoder": Part(SIGLIP_VISION, config.part("vision_config"), VISION),
        "decoder": paligemma_text(config),
    },
    models={
        "PaliGemmaForConditionalGeneration": Model("captioning", inside(linear, causal=False, drop=lambda config: 0))
    },
    heads=head({"fc": "multi_modal_projector.linear"}),
    renamed=RENAMED,
    neutral_keys=NEUTRAL_KEYS,
    image=ImageText(
        "image_token_index", starts=False, form=f"{IMAGE}<bos>{{}}\n", caption="caption en", question="answer en {}"
    ),
)
