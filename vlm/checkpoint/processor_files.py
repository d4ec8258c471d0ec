"""Files of the processors of models that read images inside their prompts, for folders of Hugging Face."""

import json
from collections.abc import Mapping
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from vlm.checkpoint.stored import Metadata
from vlm.data.images.hugging_face import RESAMPLINGS
from vlm.data.images.image import Preprocess
from vlm.data.text.chat_template import ChatTemplate
from vlm.data.text.hugging_face import make_tokenizer_files
from vlm.data.text.library import JsonTokenizer
from vlm.data.text.prompt_form import PromptForm
from vlm.data.text.tokenizer import tokenizer_from_state
from vlm.errors import UserError
from vlm.models.pretrained.architecture import IMAGE, load_architecture
from vlm.nn.image_size import sides

FITTED = ("idefics3", "smolvlm")  # model types whose processor resizes to squares
IMAGES = (
    "{% if m.content is not string %}{% for c in m.content %}{% if c.type == 'image' %}<image>{% endif %}{% endfor %}"
)
IMAGES += "{% endif %}"
TEXT = "{% if m.content is string %}{{ m.content }}{% else %}{% for c in m.content %}{% if c.type == 'text' %}"
TEXT += "{{ c.text }}{% endif %}{% endfor %}{% endif %}"
# Precedes the template of a joined decoder, which formats texts: in them, <image> stands for an image.
FLATTEN = (
    "{%- set flat = namespace(messages=[]) -%}{%- for m in messages -%}{%- set turn = namespace(text='') -%}"
    "{%- if m.content is string -%}{%- set turn.text = m.content -%}{%- else -%}{%- for c in m.content -%}"
    "{%- set turn.text = turn.text + ('<image>\\n' if c.type == 'image' else c.text) -%}{%- endfor -%}{%- endif -%}"
    "{%- set flat.messages = flat.messages + [dict(m, content=turn.text)] -%}{%- endfor -%}"
    "{%- set messages = flat.messages -%}"
)
# Chat templates of models that vlm trained without one, by task: see the fields of these tasks.
TEMPLATES = {
    "captioning": f"{{% for m in messages %}}{IMAGES}{{% endfor %}}{{{{ bos_token }}}}",
    "image_questions": f"{{% for m in messages %}}{IMAGES}{{{{ bos_token }}}}{TEXT}{{% endfor %}}",
    "conversations": "{% for m in messages %}{% if m.role == 'assistant' %}{{ bos_token }}{% endif %}"
    f"{IMAGES}{TEXT}{{{{ eos_token }}}}{{% endfor %}}{{% if add_generation_prompt %}}{{{{ bos_token }}}}{{% endif %}}",
}


class ImageTextModel(NamedTuple):
    """A converted model with the entry "vlm" of its checkpoint.

    Args:
        config, tensors: See `convert_model`.
    """

    about: Metadata
    config: dict[str, Any]
    tensors: dict[str, Tensor]


def reads_images_inside_prompts(config: Mapping[str, Any]) -> bool:
    """Returns True if the content of a config.json describes a model that reads images inside its prompts."""
    return load_architecture(str(config["model_type"]).replace("-", "_")).image is not None


def add_image_token(model: ImageTextModel) -> ImageTextModel:
    """Adds the token that represents a state of an image, if the model has none, as a row of its embedding and head.

    The new token is never generated.

    Raises:
        UserError: The tokenizer has no tokenizer.json.
    """
    about, config, tensors = model
    image = load_architecture(config["model_type"]).image
    assert image is not None
    form = about.get("form")
    if form is not None and form["image_id"] is not None:
        return model._replace(config=config | {image.id_name: form["image_id"]})
    tokenizer = tokenizer_from_state(about["tokenizer"])
    content = make_tokenizer_files(tokenizer).get("tokenizer.json")
    if content is None:
        raise UserError(f"tokenizer: a {type(tokenizer).__name__} has no tokenizer.json; use --to safetensors")
    library = json.loads(content)
    library["post_processor"] = None  # its prompts do not begin with the tokenizer's begin token
    ids = {name: getattr(tokenizer, f"{name}_id") for name in ("pad", "bos", "eos")}
    rows = config["text_config"]["vocab_size"]
    existing_id = next((token["id"] for token in library["added_tokens"] if token["content"] == IMAGE), None)
    if existing_id is not None:
        same: Any = {**about, "tokenizer": JsonTokenizer.of_file(library, size=rows, **ids).state()}
        return ImageTextModel(same, config | {image.id_name: existing_id}, tensors)
    token = {"id": rows, "content": IMAGE, "special": True}
    flags = dict.fromkeys(("single_word", "lstrip", "rstrip", "normalized"), False)
    library["added_tokens"] = [*library["added_tokens"], token | flags]
    extended = JsonTokenizer.of_file(library, size=rows + 1, **ids)
    extended_tensors = {
        name: F.pad(tensor, (0, 0, 0, 1)) if name.endswith(("embed_tokens.weight", "lm_head.weight")) else tensor
        for name, tensor in tensors.items()
    }
    decoding: dict[str, Any] = {**about.get("decoding", {})}
    decoding["never"] = [*decoding.get("never", ()), rows]
    text_config = config["text_config"] | {"vocab_size": rows + 1}
    changed: Any = {**about, "tokenizer": extended.state(), "decoding": decoding}
    return ImageTextModel(changed, config | {image.id_name: rows, "text_config": text_config}, extended_tensors)


def make_processor_files(model: ImageTextModel, module: nn.Module, images: dict[str, Any]) -> dict[str, str]:
    """Returns the files of a processor by name: of its images and its texts, and the chat template.

    Args:
        module: Our model.
        images: Content of preprocessor_config.json.
    Raises:
        UserError: No processor of Hugging Face makes these images.
    """
    about, config, _ = model
    preprocess = Preprocess.from_state(about["preprocess"])
    encoder: Any = module.encoder
    height, width = sides(preprocess.image_size)
    with torch.no_grad():
        states = encoder(torch.zeros(1, 3, height, width)).states.shape[1]
    model_type, vision = config["model_type"], config["vision_config"]
    is_joined = about.get("form") is None or about["form"]["image_id"] is None
    processor: dict[str, Any]
    if model_type in FITTED:
        images = make_fitted_config(preprocess, smol=model_type == "smolvlm")
        processor = {"processor_class": "Idefics3Processor", "image_seq_len": states}
        if is_joined:  # that class would add texts around images
            side = config["scale_factor"] * vision["patch_size"]
            processor = {"processor_class": "LlavaProcessor", "patch_size": side, "num_additional_image_tokens": 0}
            processor |= {"vision_feature_select_strategy": "full", "image_token": IMAGE}
    elif model_type == "llava":
        has_token = vision["model_type"] != "siglip_vision_model"
        processor = {"processor_class": "LlavaProcessor", "patch_size": vision["patch_size"], "image_token": IMAGE}
        processor |= {name: config[name] for name in ("vision_feature_select_strategy",)}
        processor["num_additional_image_tokens"] = int(has_token)
        config["image_seq_length"] = states
    else:
        processor, images = {"processor_class": "PaliGemmaProcessor"}, images | {"image_seq_length": states}
        config["text_config"]["num_image_tokens"] = states
    if images["image_processor_type"] == "ViTImageProcessor":
        images |= {"image_processor_type": "SiglipImageProcessor"}
    images |= {"processor_class": processor["processor_class"]}
    files = {
        name: json.dumps(content, indent=2) + "\n"
        for name, content in {"preprocessor_config.json": images, "processor_config.json": processor}.items()
    }
    chat = PromptForm.of(about["form"]).chat if "form" in about else None
    if isinstance(chat, ChatTemplate):
        return files | {"chat_template.jinja": f"{FLATTEN if is_joined else ''}{chat.text}"}
    return files | {"chat_template.jinja": TEMPLATES[str(about["task"])]} if is_joined else files


def make_fitted_config(preprocess: Preprocess, *, smol: bool) -> dict[str, Any]:
    """Returns the content of preprocessor_config.json for images that are stretched to squares, or cut into them.

    Raises:
        UserError: The images are made in another way.
    """
    height, width = sides(preprocess.image_size)
    if preprocess.resize != "squash" or preprocess.crop != 1 or height != width:
        raise UserError(
            f"data.preprocess: Idefics3's processor stretches images to squares; {preprocess.resize} with crop "
            f"{preprocess.crop:g} to {height} x {width} has no equivalent; train with squash, or use --to safetensors"
        )
    longest = preprocess.longest_edge
    size = {"height": height, "width": width} if longest is None else {"longest_edge": longest}
    resample = next(number for number, name in RESAMPLINGS.items() if name == preprocess.interpolation)
    steps = dict.fromkeys(("do_convert_rgb", "do_resize", "do_rescale", "do_normalize", "do_pad"), True)
    return {
        "image_processor_type": "SmolVLMImageProcessor" if smol else "Idefics3ImageProcessor",
        **steps,
        "do_image_splitting": preprocess.tiles,
        "size": size,
        "max_image_size": {"longest_edge": height},
        "resample": resample,
        "rescale_factor": 1 / 255,
        "image_mean": list(preprocess.mean),
        "image_std": list(preprocess.std),
    }
