"""SmolVLM2 (Marafioti et al. 2025), which is Idefics3 under another name; of films it reads none."""

from dataclasses import replace

from vlm.models.pretrained.architectures.idefics3 import ARCHITECTURE as IDEFICS3
from vlm.models.pretrained.architectures.idefics3 import MODEL

ARCHITECTURE = replace(IDEFICS3, models={"SmolVLMForConditionalGeneration": MODEL})
