"""SmolVLM2 (Marafioti et al. 2025): Idefics3 under another name. Video is not supported."""

from dataclasses import replace

from vlm.models.pretrained.architectures.idefics3 import IDEFICS3_ARCHITECTURE
from vlm.models.pretrained.architectures.idefics3 import MODEL

SMOLVLM_ARCHITECTURE = replace(IDEFICS3_ARCHITECTURE, models={"SmolVLMForConditionalGeneration": MODEL})
