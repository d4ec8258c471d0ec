"""Exports the adapters of a checkpoint for the peft library."""

from typing import cast

from vlm.checkpoint.file import inference_weights, read_file
from vlm.checkpoint.load import ADAPTERS, find_base, locate
from vlm.checkpoint.locate import PREFIX
from vlm.checkpoint.rebuild import rebuild_shapes
from vlm.checkpoint.stored import Checkpoint
from vlm.errors import UserError
from vlm.models.pretrained.architecture import Export
from vlm.models.pretrained.folder import CONFIG, Folder
from vlm.models.pretrained.peft import MERGED, export_adapters
from vlm.models.pretrained.stack import Spec
from vlm.nn.lora import is_adapter


def convert_checkpoint(path: str, loaded: Checkpoint) -> Export:
    """Returns the content of adapter_config.json and the tensors of a checkpoint's adapters.

    Args:
        path: The checkpoint.
        loaded: What `read` returned of it.
    Raises:
        UserError: It has no adapters, or peft cannot represent them or weights trained with them.
    """
    if ADAPTERS not in loaded:
        raise UserError(f"{path}: has no adapters; train with model/adapt=lora, or use --to huggingface")
    entry = loaded[ADAPTERS]
    places = {part: str(base["place"]) for part, base in entry["base"].items()}
    base = find_base(places[""], locate(path)) if [*places] == [""] else None
    folder = Folder(base) if base is not None and (base / CONFIG).is_file() else None
    if folder is None or folder.origin not in folder.architecture.models:
        raise UserError(f"{path}: its base {', '.join(places.values())} is no folder of a Hugging Face model; {MERGED}")
    trained = inference_weights(read_file(path))
    adapters = {name: tensor for name, tensor in trained.items() if is_adapter(name)}
    saved = {name: tensor for name, tensor in trained.items() if name not in adapters}
    shapes = rebuild_shapes(cast(Spec, loaded["vlm"]["model"]))
    place = places[""].removeprefix(PREFIX) if places[""].startswith(PREFIX) else str(base)
    return export_adapters(shapes, folder, adapters, saved, scale=float(entry["scale"]), base=place)


def make_peft_example(loaded: Checkpoint) -> list[str]:
    """Returns lines of Python that load exported adapters."""
    kind = loaded["vlm"].get("base_class")
    return [
        "import peft",
        "import transformers",
        "",
        "config = peft.PeftConfig.from_pretrained(folder)",
        f"base = transformers.{kind}.from_pretrained(config.base_model_name_or_path)",
        "model = peft.PeftModel.from_pretrained(base, folder)",
    ]
