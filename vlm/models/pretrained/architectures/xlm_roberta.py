"""XLM-RoBERTa (Conneau et al. 2020): RoBERTa for 100 languages, with a SentencePiece vocabulary."""

from dataclasses import replace

from vlm.models.pretrained.architectures import roberta
from vlm.models.pretrained.stack import Part

XLM_ROBERTA = replace(roberta.ROBERTA, model_type="xlm-roberta")
XLM_ROBERTA_ARCHITECTURE = replace(
    roberta.ROBERTA_ARCHITECTURE,
    parts=lambda config: {"encoder": Part(XLM_ROBERTA, config)},
    models={f"XLM{name}": model for name, model in roberta.ROBERTA_ARCHITECTURE.models.items()},
)
