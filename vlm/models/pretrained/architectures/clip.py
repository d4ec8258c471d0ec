"""CLIP (Radford et al. 2021), of which the encoder of images is taken."""

from vlm.models.pretrained.architecture import Architecture
from vlm.models.pretrained.architectures.clip_vision_model import CLIP_VISION
from vlm.models.pretrained.stack import Part

ARCHITECTURE = Architecture(parts=lambda config: {"encoder": Part(CLIP_VISION, config["vision_config"])})
