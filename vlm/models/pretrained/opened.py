"""Opens published weights: a Hugging Face folder or a GGUF file."""

from pathlib import Path

from vlm.models.pretrained.architecture import list_model_types
from vlm.models.pretrained.folder import CONFIG, Folder
from vlm.models.pretrained.gguf.file import GGUF, SUFFIX


def is_published(path: Path) -> bool:
    """Returns True for a Hugging Face folder or a GGUF file."""
    return (path.suffix.lower() == SUFFIX and path.is_file()) or (path.is_dir() and (path / CONFIG).exists())


def is_supported(folder: Folder) -> bool:
    """Returns True if vlm supports the folder's model_type."""
    return str(folder.config.values.get("model_type")).replace("-", "_") in list_model_types()


def open_folder(path: str | Path) -> Folder:
    """Opens a Hugging Face folder, or a GGUF file with the same interface.

    Raises:
        UserError: The file cannot be read.
    """
    return GGUF(path) if Path(path).suffix.lower() == SUFFIX and Path(path).is_file() else Folder(path)
