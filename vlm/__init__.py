"""vlm: train, resume, evaluate and use small vision-language models."""

__version__ = "0.1.0"
