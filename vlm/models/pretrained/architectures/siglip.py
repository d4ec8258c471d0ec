"""SigLIP (Zhai et al. 2023), of which the encoder of images is taken, bare or with a head of classes."""

from vlm.models.classifier import Classifier
from vlm.models.pretrained.architecture import Architecture, Model
from vlm.models.pretrained.architectures.siglip_vision_model import SIGLIP_VISION
from vlm.models.pretrained.specs import classifier
from vlm.models.pretrained.stack import Names, Part, Sources, modules


def class_head(model: Classifier, names: Names) -> Sources:
    """The head, where ours reads the mean of all states as theirs does."""
    return modules({"head": "classifier"}) if model.pool == "mean" else {}


ARCHITECTURE = Architecture(
    parts=lambda config: {"encoder": Part(SIGLIP_VISION, config["vision_config"])},
    models={"SiglipForImageClassification": Model("classification", classifier("mean"))},
    heads={Classifier: class_head},
)
