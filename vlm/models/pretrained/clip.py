"""The whole of a CLIP folder (Radford et al. 2021): both towers with their projections, for images beside texts."""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from vlm.errors import UserError
from vlm.models.decoder import Decoder
from vlm.models.pretrained.architectures.clip import CLIP_TEXT
from vlm.models.pretrained.architectures.clip_vision_model import CLIP_VISION
from vlm.models.pretrained.fields import integer
from vlm.models.pretrained.folder import Folder
from vlm.models.pretrained.specification import arguments_of
from vlm.models.pretrained.stack import prefixed, weight_map
from vlm.models.vit import ViT

TOWERS = {"vision": CLIP_VISION, "text": CLIP_TEXT}
PROJECTIONS = {"vision_projection": "visual_projection", "text_projection": "text_projection"}


class Clip(nn.Module):
    """Images and texts as vectors of one space, as CLIPModel computes them.

    Args:
        vision: The encoder of images, pooled by its class token.
        text: The causal encoder of texts, pooled by the token that ends one.
        dim: Width E of the space.
    Shapes:
        images (B, 3, H, W) normalised; tokens (B, L), each row with its length (B,) -> (B, E), of norm 1
    """

    def __init__(self, *, vision: ViT, text: Decoder, dim: int) -> None:
        super().__init__()
        self.vision, self.text = vision, text
        self.vision_projection = nn.Linear(vision.dim, dim, bias=False)
        self.text_projection = nn.Linear(text.token_embed.embedding_dim, dim, bias=False)

    def embed_images(self, images: Tensor) -> Tensor:
        return F.normalize(self.vision_projection(self.vision(images).states[:, 0]), dim=-1)

    def embed_texts(self, tokens: Tensor, lengths: Tensor) -> Tensor:
        """Embeddings of texts; after the end of one a row may hold anything, which no token before it sees."""
        hidden = self.text(tokens)  # (B, L, D)
        rows = torch.arange(len(tokens), device=tokens.device)
        return F.normalize(self.text_projection(hidden[rows, lengths - 1]), dim=-1)


def load_clip(folder: Folder) -> Clip:
    """The model of a local folder of Hugging Face's CLIPModel; of a size that its tensors have.

    Raises:
        UserError: The folder is of another model, or damaged.
    """
    if folder.config.values.get("model_type") != "clip" or folder.origin not in ("CLIPModel", "clip"):
        raise UserError(f"{folder}: holds no CLIPModel; give a folder of one, such as openai/clip-vit-base-patch32")
    configs = {name: folder.config.part(f"{name}_config") for name in TOWERS}
    sizes = {name: arguments_of(stack, configs[name]) for name, stack in TOWERS.items()}
    dim = folder.config.read(integer("projection_dim", 512))
    try:
        with torch.device("meta"):
            towers = {name: stack.kind(**sizes[name]) for name, stack in TOWERS.items()}
            model = Clip(**towers, dim=dim)  # type: ignore[arg-type]
        stored = folder.weights()
        weights = weight_map(PROJECTIONS, model.state_dict())
        for name, stack in TOWERS.items():
            weights |= prefixed(stack.weights(towers[name]), f"{name}.", stack.prefix)
        tensors = {name: read(*(stored[one] for one in names)).float() for name, (names, read, _) in weights.items()}
        model.load_state_dict(tensors, assign=True)
    except UserError:
        raise
    except Exception as fault:  # weights may be of any shape
        reason = f"no {fault}" if isinstance(fault, KeyError) else (str(fault) or type(fault).__name__).split("\n")[0]
        raise UserError(f"{folder}: its config.json and weights do not fit ({reason:.200}); fetch it again") from fault
    return model.eval()
