"""Reads a decoder's GGUF file with the mmproj file of an image encoder, like a folder of LLaVA or Idefics3."""

import json
from collections.abc import Callable
from dataclasses import replace
from functools import cached_property, partial
from pathlib import Path
from typing import Any

from torch import Tensor

from vlm.errors import UserError
from vlm.models.pretrained.architecture import IMAGE, Architecture
from vlm.models.pretrained.architectures.dual_encoders import SIGLIP_VISION
from vlm.models.pretrained.fields import Fields
from vlm.models.pretrained.folder import CONFIG, GENERATION, METADATA
from vlm.models.pretrained.gguf.config import find_ends, list_tokens, make_generation_config, make_tokenizer_files
from vlm.models.pretrained.gguf.file import GGUF, check_tensors, read_tensor
from vlm.models.pretrained.gguf.header import read_parts
from vlm.models.pretrained.gguf.projector import (
    IDEFICS3,
    PREPROCESS,
    check_projector,
    make_preprocessor_config,
    make_vision_config,
    map_projector_tensors,
)
from vlm.models.pretrained.stack import Part

TEXT, SAVED_AS = "language_model.", {"llava": "Llava", IDEFICS3: "Idefics3"}
SUPPORTED = {"llava": ("llama", "qwen2", "qwen3"), IDEFICS3: ("llama",)}  # decoders


class GGUFPair(GGUF):
    """A decoder's file and the mmproj file of an image encoder.

    Args:
        path: The decoder's file, or any part of a split one.
        projector: The mmproj file.
    Raises:
        UserError: A file is missing, damaged, too large, or not supported, or they do not fit together.
    """

    def __init__(self, path: str | Path, projector: str | Path) -> None:
        self.projector = Path(projector)
        super().__init__(path)

    def _create_files(self) -> dict[str, Any]:
        files = super()._create_files()
        try:
            self._projector_header = header = read_parts(self.projector)
            check_tensors(header.tensors)
            kind = check_projector(header)
            config = make_vision_config(header, kind)
            self._projector_names = map_projector_tensors(header, kind)
            preprocessor = make_preprocessor_config(header, kind)
            stated = header.values.get(PREPROCESS)
            preprocess = None if stated is None else json.loads(stated)
        except KeyError as fault:
            raise UserError(f"--mmproj {self.projector}: has no {fault.args[0]}; choose another file") from fault
        except (AttributeError, OSError, RecursionError, TypeError, ValueError) as fault:
            raise UserError(f"--mmproj {self.projector}: cannot be read: {fault}; choose another file") from fault
        decoder = files[CONFIG]
        model_type, width = config["model_type"], header.values["clip.vision.projection_dim"]
        if decoder["model_type"] not in SUPPORTED[model_type] or decoder["hidden_size"] != width:
            sizes = f"{decoder['model_type']} of width {decoder.get('hidden_size', decoder.get('n_embd'))}"
            raise UserError(
                f"--mmproj {self.projector}: is of a {' or '.join(SUPPORTED[model_type])} of width {width!r:.20}, "
                f"{self.path} is a {sizes}; give the two files of one model"
            )
        values = self._header.values
        tokens = list_tokens(values)
        if IMAGE not in tokens:
            raise ValueError(f"tokenizer.ggml.tokens has no {IMAGE}, which represents an image in prompts")
        image_id = tokens.index(IMAGE)
        config |= {
            "architectures": [f"{SAVED_AS[model_type]}ForConditionalGeneration"],
            "image_token_id" if model_type == IDEFICS3 else "image_token_index": image_id,
            "text_config": {name: value for name, value in decoder.items() if name != "architectures"},
            "tie_word_embeddings": decoder["tie_word_embeddings"],
        }
        ends = find_ends(values)
        files |= {CONFIG: config, GENERATION: make_generation_config(values, ends)}
        files |= {"preprocessor_config.json": preprocessor}
        if preprocess is not None:
            files[METADATA] = {"preprocess": preprocess}
        files.pop("tokenizer.model", None)
        return files | make_tokenizer_files(values, decoder["vocab_size"], ends, marked=True)

    @cached_property
    def architecture(self) -> Architecture:
        """As of a folder, but with the positions of patches that llama.cpp uses, which Idefics3's own code rounds."""
        found = super().architecture

        def read_parts_of(config: Fields) -> dict[str, Part]:
            parts = dict(found.parts(config))
            if config.values["model_type"] == IDEFICS3:
                encoder = parts["encoder"]
                stack = replace(encoder.stack, more=SIGLIP_VISION.more)
                parts["encoder"] = encoder._replace(stack=stack)
            return parts

        return replace(found, parts=read_parts_of)

    def _make_readers(self) -> dict[str, Callable[[], Tensor]]:
        readers = {f"{TEXT}{name}": reader for name, reader in super()._make_readers().items()}
        return readers | {theirs: partial(self._read_projector, name) for name, theirs in self._projector_names.items()}

    def _read_projector(self, name: str) -> Tensor:
        try:
            return read_tensor(self._projector_header.tensors[name])
        except (OSError, ValueError) as fault:
            raise UserError(f"{self.projector} cannot be read: {fault}; download it again") from fault
