"""SigLIP (Zhai et al. 2023), of which the encoder of images is taken, bare or with a head of classes."""

from torch import nn

from vlm.models.classifier import Classifier
from vlm.models.pretrained.architecture import Architecture, Export, Model, classifier
from vlm.models.pretrained.architectures.siglip_vision_model import SIGLIP_VISION
from vlm.models.pretrained.export import export_classifier
from vlm.models.pretrained.stack import Names, Part
from vlm.models.vit import ViT


def class_head(model: Classifier) -> Names:
    """The head, where ours reads the mean of all states as theirs does."""
    return {"head": "classifier"} if model.pool == "mean" else {}


def export(model: nn.Module) -> Export | None:
    if not isinstance(model, Classifier) or type(model.encoder) is not ViT or model.encoder.class_token is not None:
        return None
    config, tensors = export_classifier(model, SIGLIP_VISION, pool="mean", head=class_head(model))
    whole = {"model_type": "siglip", "architectures": ["SiglipForImageClassification"], "vision_config": config}
    return whole, tensors


ARCHITECTURE = Architecture(
    parts=lambda config: {"encoder": Part(SIGLIP_VISION, config.part("vision_config"))},
    models={"SiglipForImageClassification": Model("classification", classifier("mean"))},
    heads={Classifier: class_head},
    export=export,
)
