"""The published sizes of pretrained models with random weights: the same logits and texts as by `transformers`?

    python benchmarks/pretrained_equality.py vit_gpt2 blip_base git_base bert_base ...    # without a name, all of them

Each model is made as its published config.json describes it, its weights drawn wide (standard deviation 0.2, so that
logits do not tie), saved by `transformers` in its own layout, and read by both, each in a process of its own. A line a
model: the largest difference of logits (or of states, of an encoder), beside the largest of each side from the same in
float64, of which such weights make more than 1e-4; their standard deviation and the least margin of the first two; how
many greedy and beam-4 texts of 8 images are equal; the largest difference of pixels; the peak memory of both.
"""

import argparse
import resource
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from string import ascii_lowercase
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1] / "tests" / "helpers"))

import torch
import transformers as t
from hugging import END, caption_logits, photos, wide, written
from PIL import Image
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from torch import Tensor, nn

BEAMS, TOKENS = (1, 4), 16
SIDES = ("made", "theirs", "ours")
Parts = list[Any]  # all that is saved of a model, the model first


def words() -> t.BertTokenizer:
    """A vocabulary of BERT's size."""
    syllables = [a + b + c for a in ascii_lowercase for b in ascii_lowercase for c in ascii_lowercase]
    pieces = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", *ascii_lowercase, *syllables]
    pieces += [f"##{piece}" for piece in (*ascii_lowercase, *syllables)]
    return t.BertTokenizer(vocab={piece: id for id, piece in enumerate(pieces[:30522])})


def byte_pairs() -> t.PreTrainedTokenizerFast:
    """A vocabulary of GPT-2's size."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    merges = [(a, b) for a in alphabet for b in alphabet][: 50257 - 1 - len(alphabet)]
    pieces = [*alphabet, *(a + b for a, b in merges), END]
    tokenizer = Tokenizer(models.BPE(vocab={piece: id for id, piece in enumerate(pieces)}, merges=merges))
    tokenizer.pre_tokenizer, tokenizer.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel()
    return t.PreTrainedTokenizerFast(tokenizer_object=tokenizer, bos_token=END, eos_token=END, unk_token=END)


def vit_gpt2() -> Parts:
    tokenizer = byte_pairs()
    decoder = t.GPT2Config(add_cross_attention=True, is_decoder=True)
    config = t.VisionEncoderDecoderConfig.from_encoder_decoder_configs(t.ViTConfig(), decoder)
    model = wide(t.VisionEncoderDecoderModel(config))
    end = tokenizer.eos_token_id
    ids = {"decoder_start_token_id": end, "bos_token_id": end, "eos_token_id": end, "pad_token_id": end}
    model.generation_config.update(**ids)
    return [model, tokenizer, t.ViTImageProcessor()]


def blip_base() -> Parts:
    tokenizer = words()
    text = {"num_attention_heads": 12, "sep_token_id": tokenizer.sep_token_id}
    model = wide(t.BlipForConditionalGeneration(t.BlipConfig(text_config=text, vision_config={})))
    return [model, tokenizer, t.BlipImageProcessor()]


def git_base() -> Parts:
    tokenizer = words()
    ids = {"bos_token_id": tokenizer.cls_token_id, "eos_token_id": tokenizer.sep_token_id}
    return [wide(t.GitForCausalLM(t.GitConfig(vision_config={}, **ids))), tokenizer, t.CLIPImageProcessor()]


def bert_base() -> Parts:
    return [wide(t.BertForMaskedLM(t.BertConfig())), words()]


def gpt2() -> Parts:
    return [wide(t.GPT2LMHeadModel(t.GPT2Config())), byte_pairs()]


def vit_base() -> Parts:
    return [wide(t.ViTForImageClassification(t.ViTConfig(num_labels=1000))), t.ViTImageProcessor()]


def deit_base() -> Parts:
    return [wide(t.DeiTForImageClassificationWithTeacher(t.DeiTConfig(num_labels=1000))), t.DeiTImageProcessor()]


def clip_base() -> Parts:
    return [wide(t.CLIPVisionModel(t.CLIPVisionConfig())), t.CLIPImageProcessor()]


def dinov2_base() -> Parts:
    processor = t.BitImageProcessor(size={"shortest_edge": 256})
    return [wide(t.Dinov2Model(t.Dinov2Config(image_size=518))), processor]


CAPTIONERS = {"vit_gpt2": vit_gpt2, "blip_base": blip_base, "git_base": git_base}
READERS = {"bert_base": bert_base, "gpt2": gpt2}
SEERS = {"vit_base": vit_base, "deit_base": deit_base, "clip_base": clip_base, "dinov2_base": dinov2_base}
MODELS: dict[str, Callable[[], Parts]] = CAPTIONERS | READERS | SEERS


@torch.inference_mode()
def make(name: str, folder: Path) -> dict[str, Any]:
    """Saves a model; inputs, and its logits in float64."""
    torch.manual_seed(0)
    model, *others = MODELS[name]()
    for part in (model, *others):
        part.save_pretrained(folder / "model")
    paths = photos(folder / "photos")
    results: dict[str, Any] = {"tokens": torch.randint(5, 30000, (len(paths), 12)), "kind": type(model).__name__}
    if name not in READERS:
        results["pixels"] = others[-1]([Image.open(path) for path in paths], return_tensors="pt").pixel_values
    exact = {key: value.double() if key == "pixels" else value for key, value in results.items()}
    return results | {"logits": logits_of(name, model.double(), exact)}


@torch.inference_mode()
def theirs(name: str, folder: Path, known: dict[str, Any]) -> dict[str, Any]:
    """Logits and texts of `transformers`, of the folder that it saved."""
    model = getattr(t, known["kind"]).from_pretrained(folder / "model").eval()
    results: dict[str, Any] = {"logits": logits_of(name, model, known)}
    if name in CAPTIONERS:
        tokenizer, options = t.AutoTokenizer.from_pretrained(folder / "model"), {"max_length": TOKENS}
        results["texts"] = {
            beam: written(model, tokenizer, known["pixels"], num_beams=beam, **options) for beam in BEAMS
        }
    return results


def logits_of(name: str, model: Any, known: dict[str, Any]) -> Tensor:
    """Logits of theirs, or states of an encoder alone."""
    if name in CAPTIONERS:
        return caption_logits(model, known["pixels"], known["tokens"])
    if name in READERS:
        return model(known["tokens"]).logits
    output = model(pixel_values=known["pixels"])
    if hasattr(output, "logits"):
        return output.logits
    states = output.last_hidden_state
    return model.post_layernorm(states) if hasattr(model, "post_layernorm") else states


@torch.inference_mode()
def ours(name: str, folder: Path, known: dict[str, Any]) -> dict[str, Any]:
    """Logits and texts of ours, of the same inputs."""
    from vlm.checkpoint.load import load_model, read
    from vlm.data.images.image import load_image
    from vlm.inference.captioning import Captioner
    from vlm.inference.options import DecodingOptions

    place, tokens = str(folder / "model"), known["tokens"]
    if name in CAPTIONERS:
        captioner = Captioner(place)
        images = [captioner.pixels(load_image(path)) for path in sorted(map(str, (folder / "photos").iterdir()))]
        results: dict[str, Any] = {"texts": {}, "pixels": captioner.preprocess.normalize(torch.stack(images))}
        model = captioner.model
        results["logits"] = model.head(model(known["pixels"], tokens))
        for beam in BEAMS:
            settled = DecodingOptions(beam=beam, max_tokens=TOKENS - 1).settle(captioner.decoding)
            decoding = settled.search(settled.rules(captioner.tokenizer), sample=False)
            results["texts"][beam] = [texts[0].text for texts in captioner.stream([images], decoding, rows=len(images))]
        return results
    if name in READERS:
        model = load_model(read(place))
        if name == "bert_base":
            hidden = model(tokens, None, None, torch.arange(tokens.numel()))
            return {"logits": model.head.logits(hidden).unflatten(0, tokens.shape)}
        return {"logits": model.head(model(tokens))}
    return {"logits": seen(place, known["pixels"])}


def seen(place: str, pixels: Tensor) -> Tensor:
    """Logits of a classifier, or states of an encoder alone."""
    from vlm.checkpoint.hugging_face import describe_folder
    from vlm.checkpoint.load import load_model, read
    from vlm.checkpoint.rebuild import rebuild
    from vlm.models.pretrained.load import load_hugging_face

    specified, _ = describe_folder(place)
    if specified.model is not None:
        return load_model(read(place))(pixels)
    encoder: nn.Module = rebuild(specified.parts["encoder"])
    load_hugging_face(encoder, place)
    return encoder.eval()(pixels).states


def compare(name: str) -> bool:
    """Runs both sides in processes of their own and prints a line; False where they differ."""
    with tempfile.TemporaryDirectory() as folder:
        for side in SIDES:
            subprocess.run([sys.executable, __file__, name, "--side", side, "--folder", folder], check=True)
        exact, a, b = (torch.load(Path(folder) / side, weights_only=True) for side in SIDES)
    difference = (a["logits"] - b["logits"]).abs().max().item()
    errors = [(results["logits"] - exact["logits"]).abs().max().item() for results in (a, b)]
    first, second = exact["logits"].topk(2).values.unbind(-1)
    words = [f"difference {difference:.1e}, from float64 theirs {errors[0]:.1e}, ours {errors[1]:.1e}"]
    words += [f"deviation {exact['logits'].std().item():.2f}, margin {(first - second).min().item():.1e}"]
    equal = difference <= 1e-4
    for beam in BEAMS if name in CAPTIONERS else ():
        pairs = list(zip(a["texts"][beam], b["texts"][beam], strict=True))
        same, kinds = sum(one == other for one, other in pairs), len(set(a["texts"][beam]))
        words.append(f"{'greedy' if beam == 1 else f'beam {beam}'} {same} of {len(pairs)} texts, {kinds} kinds")
        equal &= same == len(pairs)
    if "pixels" in b:
        words.append(f"pixels {(exact['pixels'] - b['pixels']).abs().max().item():.1e}")
    memory = ", ".join(f"{side} {results['peak'] / 2**20:.2f} GiB" for side, results in (("theirs", a), ("ours", b)))
    print(f"{name}: {'equal' if equal else 'NOT EQUAL'}; {'; '.join(words)}; peak memory {memory}", flush=True)
    return equal


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*", metavar="NAME", help=", ".join(MODELS))
    parser.add_argument("--side", choices=SIDES, help=argparse.SUPPRESS)
    parser.add_argument("--folder", type=Path, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if unknown := [name for name in options.names if name not in MODELS]:
        parser.error(f"{unknown[0]} is none of {', '.join(MODELS)}")
    if options.side is None:
        return 0 if all([compare(name) for name in options.names or MODELS]) else 1
    [name], folder = options.names, options.folder
    if options.side == SIDES[0]:
        results = make(name, folder)
    else:
        known = torch.load(folder / SIDES[0], weights_only=True)
        results = (theirs if options.side == "theirs" else ours)(name, folder, known)
    results["peak"] = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss  # KiB
    torch.save(results, folder / options.side)
    return 0


if __name__ == "__main__":
    sys.exit(main())
