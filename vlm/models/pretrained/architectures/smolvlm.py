"""SmolVLM2 (Marafioti et al. 2025): Idefics3 under another name. Video is not supported."""

from dataclasses import replace

from vlm.models.pretrained.architectures.idefics3 import ARCHITECTURE as IDEFICS3
from vlm.models.pretrained.architectures.idefics3 import MODEL

ARCHITECTURE = replace(IDEFICS3, models={"SmolVLMForConditionalGeneration": MODEL})
