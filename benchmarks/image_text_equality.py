"""Compares models that read images inside their text, at published sizes with random weights, with `transformers`.

    python benchmarks/image_text_equality.py smolvlm_256m paligemma_3b_layer llava_7b_layer

SmolVLM-256M is whole; the others have one layer of each stack. `transformers` saves each model, and each side reads it
in its own process. Matrices and word tables are drawn with a standard deviation of 1 / sqrt(inputs). One line per
model: the largest difference of logits over the prompt's last token and three more, between the sides and of each from
ours in float64; the largest difference of pixels; and the number of equal greedy and beam-4 texts of 8 images with one
question each. Texts that differ are listed with the margin of `transformers`.
"""

import argparse
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

sys.path[:0] = [str(Path(__file__).parent), str(Path(__file__).parents[1] / "tests" / "helpers")]

import image_text
import torch
import transformers as t
from hugging import photos, wide
from PIL import Image
from pretrained_equality import even_out
from transformers.models.idefics3.image_processing_pil_idefics3 import Idefics3ImageProcessorPil

QUESTIONS = ["what is it?", "how many dogs run", "red", "is the cat on it?", "a", "why", "where?", "the big one"]
BEAMS, TOKENS = (1, 4), 12
SIDES = ("theirs", "ours")


def smolvlm_256m() -> list[Any]:
    tokenizer = image_text.byte_pairs()
    text = {"hidden_size": 576, "num_hidden_layers": 30, "num_attention_heads": 9, "num_key_value_heads": 3}
    text |= {"intermediate_size": 1536, "vocab_size": 49280, "max_position_embeddings": 8192, **ids_of(tokenizer)}
    vision = {"hidden_size": 768, "num_hidden_layers": 12, "num_attention_heads": 12, "intermediate_size": 3072}
    config = t.Idefics3Config(
        vision_config=vision | {"image_size": 512, "patch_size": 16},
        text_config=t.LlamaConfig(**text, rope_parameters={"rope_type": "default", "rope_theta": 1e5}),
        image_token_id=tokenizer.convert_tokens_to_ids("<image>"),
        scale_factor=4,
    )
    sizes = {"size": {"longest_edge": 2048}, "max_image_size": {"longest_edge": 512}}
    image = Idefics3ImageProcessorPil(**sizes, do_image_splitting=False)
    processor = t.Idefics3Processor(image, tokenizer, image_seq_len=64, chat_template=image_text.TEMPLATES["smolvlm"])
    return [t.Idefics3ForConditionalGeneration(config), processor]


def paligemma_3b_layer() -> list[Any]:
    tokenizer = image_text.pieces()
    image = t.SiglipImageProcessor(size={"height": 224, "width": 224}, resample=3)
    image.image_seq_length = 256
    processor = t.PaliGemmaProcessor(image, tokenizer)
    vision = {"hidden_size": 1152, "num_hidden_layers": 1, "num_attention_heads": 16, "intermediate_size": 4304}
    text = {"hidden_size": 2048, "num_hidden_layers": 1, "num_attention_heads": 8, "num_key_value_heads": 1}
    text |= {"intermediate_size": 16384, "head_dim": 256, "vocab_size": 257152, **ids_of(tokenizer)}
    config = t.PaliGemmaConfig(
        vision_config=t.SiglipVisionConfig(**vision, image_size=224, patch_size=14, vision_use_head=False),
        text_config=t.GemmaConfig(**text),
        image_token_index=tokenizer.convert_tokens_to_ids("<image>"),
    )
    return [t.PaliGemmaForConditionalGeneration(config), processor]


def llava_7b_layer() -> list[Any]:
    tokenizer = image_text.pieces()
    vision = {"hidden_size": 1024, "num_hidden_layers": 2, "num_attention_heads": 16, "intermediate_size": 4096}
    text = {"hidden_size": 4096, "num_hidden_layers": 1, "num_attention_heads": 32, "intermediate_size": 11008}
    config = t.LlavaConfig(
        vision_config=t.CLIPVisionConfig(**vision, image_size=336, patch_size=14),
        text_config=t.LlamaConfig(**text, vocab_size=32064, max_position_embeddings=4096, **ids_of(tokenizer)),
        image_token_index=tokenizer.convert_tokens_to_ids("<image>"),
    )
    image = t.CLIPImageProcessor(size={"shortest_edge": 336}, crop_size={"height": 336, "width": 336})
    processor = t.LlavaProcessor(
        image,
        tokenizer,
        patch_size=14,
        vision_feature_select_strategy="default",
        chat_template=image_text.TEMPLATES["llava"],
        num_additional_image_tokens=1,
    )
    return [t.LlavaForConditionalGeneration(config), processor]


MODELS = {"smolvlm_256m": smolvlm_256m, "paligemma_3b_layer": paligemma_3b_layer, "llava_7b_layer": llava_7b_layer}


def ids_of(tokenizer: Any) -> dict[str, int]:
    return {f"{name}_token_id": getattr(tokenizer, f"{name}_token_id") for name in ("bos", "eos", "pad")}


@torch.inference_mode()
def theirs(name: str, folder: Path) -> dict[str, Any]:
    """Returns pixels, tokens, logits and texts of `transformers`, and the margins of its best texts."""
    torch.manual_seed(0)
    model, processor = MODELS[name]()
    model = wide(model)
    even_out(model)
    for table in (module.weight for module in model.modules() if isinstance(module, torch.nn.Embedding)):
        table.normal_(std=table.size(1) ** -0.5)  # a tied table is also the head
    model.generation_config.update(**ids_of(processor.tokenizer))
    for part in (processor, model):
        part.save_pretrained(folder / "model")
    results: dict[str, Any] = {"pixels": [], "tokens": [], "logits": [], "texts": [], "margins": []}
    for path, question in zip(photos(folder / "photos"), QUESTIONS, strict=True):
        prompt, bidirectional = f"<image>answer en {question}", name.startswith("paligemma")
        if not bidirectional:
            content = [{"type": "image"}, {"type": "text", "text": question}]
            prompt = processor.apply_chat_template([{"role": "user", "content": content}], add_generation_prompt=True)
        inputs = dict(processor(text=prompt, images=Image.open(path), return_tensors="pt"))
        inputs.pop("labels", None)
        if not bidirectional:
            inputs.pop("token_type_ids", None)
        results["pixels"].append(inputs["pixel_values"].flatten(0, -4))
        tokens = inputs["input_ids"][0].tolist()
        results["tokens"].append([-1 if id == processor.image_token_id else id for id in tokens])
        more = torch.tensor([[*tokens, 30, 31, 32]])
        longer = inputs | {"input_ids": more, "attention_mask": torch.ones_like(more)}
        if bidirectional:
            longer["token_type_ids"] = torch.tensor([[0] * len(tokens) + [1] * 3])
        results["logits"].append(model(**longer).logits[0, -4:].clone())
        for beam in BEAMS:
            options = {"max_new_tokens": TOKENS, "num_beams": beam, "num_return_sequences": min(beam, 2)}
            scores = {"return_dict_in_generate": True, "output_scores": True}
            out = model.generate(**inputs, **options, **scores, do_sample=False)
            row = out.sequences[0, len(tokens) :].tolist()
            results["texts"].append([id for id in row if id != processor.tokenizer.eos_token_id])
            results["margins"].append(
                min(float(-one.topk(2).values.diff()) for one in out.scores)
                if beam == 1
                else float(out.sequences_scores[0] - out.sequences_scores[1])
            )
    return results


@torch.inference_mode()
def ours(folder: Path) -> dict[str, Any]:
    """Returns the same of vlm, from the image files, and logits in float64."""
    from vlm.tasks.image_questions.predict import PromptedAnswerer

    answerer = PromptedAnswerer(str(folder / "model"))
    results: dict[str, Any] = {"pixels": [], "tokens": [], "logits": [], "texts": [], "exact": []}
    rows = []
    for path, question in zip(sorted(map(str, (folder / "photos").iterdir())), QUESTIONS, strict=True):
        for beam in BEAMS:
            options = answerer.options(question=question, beam=beam, max_tokens=TOKENS)
            (prompted,) = answerer.prepare((path, [question]), options)
            ((_, ((text, *_),)),) = answerer.results([[[prompted]]], options)
            results["texts"].append(text.tokens)
        results["pixels"].append(answerer.preprocess.normalize(prompted.pixels))
        results["tokens"].append(prompted.tokens)
        rows.append((torch.tensor([[prompted.tokens[-1], 30, 31, 32]]), prompted))
    model = answerer.model
    for key in ("logits", "exact"):
        results[key] = [model.head(model.decoder(row, None, answerer.encode([prompted])))[0] for row, prompted in rows]
        model.double()
    return results


def largest(some: list[torch.Tensor], others: list[torch.Tensor]) -> float:
    """Returns the largest absolute difference."""
    return max(float((one - other).abs().max()) for one, other in zip(some, others, strict=True))


def compare(name: str) -> bool:
    with tempfile.TemporaryDirectory() as folder:
        for side in SIDES:
            subprocess.run([sys.executable, __file__, name, "--side", side, "--folder", folder], check=True)
        a, b = (torch.load(Path(folder) / side, weights_only=True) for side in SIDES)
    logits, pixels = (largest(a[key], b[key]) for key in ("logits", "pixels"))
    differ = [margin for x, y, margin in zip(a["texts"], b["texts"], a["margins"], strict=True) if x != y]
    kinds = len({tuple(text) for text in a["texts"]})
    equal = logits <= 1e-4 and a["tokens"] == b["tokens"] and all(margin <= 1e-3 for margin in differ)
    texts = f"texts {len(a['texts']) - len(differ)} of {len(a['texts'])} ({kinds} kinds), margins of others {differ}"
    deviation = torch.cat(a["logits"]).std().item()
    print(
        f"{name}: {'equal' if equal else 'NOT EQUAL'}; logits {logits:.1e} (deviation {deviation:.2f}; from "
        f"float64 ours {largest(b['logits'], b['exact']):.1e}, theirs {largest(a['logits'], b['exact']):.1e}); pixels "
        f"{pixels:.1e}; tokens {'equal' if a['tokens'] == b['tokens'] else 'differ'}; {texts}",
        flush=True,
    )
    return equal


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*", metavar="NAME", help=", ".join(MODELS))
    parser.add_argument("--side", choices=SIDES, help=argparse.SUPPRESS)
    parser.add_argument("--folder", type=Path, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.side is None:
        return 0 if all([compare(name) for name in options.names or MODELS]) else 1
    results = theirs(options.names[0], options.folder) if options.side == "theirs" else ours(options.folder)
    torch.save(results, options.folder / options.side)
    return 0


if __name__ == "__main__":
    sys.exit(main())
