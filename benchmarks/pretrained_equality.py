"""Compares logits and texts of pretrained models at published sizes, with random weights, with `transformers`.

    python benchmarks/pretrained_equality.py vit_gpt2 blip_base git_base bert_base ...    # without a name, all of them

Each model is made from its published config.json with random weights, `transformers` saves it in its own layout, and
each side reads it in its own process. Weights are drawn twice:

    even    embeddings, biases and the spread of norms with a standard deviation of 0.2, which keeps logits from tying;
            matrices with 1 / sqrt(inputs), which keeps the size of activations. Logits and texts are compared in
            float32, texts from the image files on.
    wide    all with 0.2. Attention scores then have a deviation of about 30, so that each query attends to one key,
            and every layer multiplies rounding errors by about 3. After 24 layers float32 is far from float64 on
            either side; so logits and texts are compared in float64, from equal pixels.

One line per model and drawing: the largest difference of logits (for an encoder: of states) in the compared type; the
change of theirs in float64 if the last bit of the pixels changes, below which differences mean nothing; the difference
of float32 from float64 on either side, absolute and relative to the standard deviation; the least margin between the
two largest logits; how many greedy and beam-4 texts of 8 images or of 50 sentences are equal; and the largest
difference of pixels. `transformers` may compute the softmax of attention in float32 in any type; this is disabled where
float64 is compared. For decoders of Llama's family a row of benchmarks/hub.py is printed, for "even" in float32.
"""

import argparse
import subprocess
import sys
import tempfile
from collections.abc import Callable
from functools import partial
from pathlib import Path
from random import Random
from string import ascii_lowercase
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1] / "tests" / "helpers"))

import torch
import transformers as t
from decoder_sizes import DECODERS, byte_pairs
from hugging import TEXTS, caption_logits, photos, wide, write_captions
from PIL import Image
from torch import Tensor, nn
from transformers.pytorch_utils import Conv1D
from writer_sizes import LINE_READERS, TRANSLATORS, our_tokens, their_tokens, translator_logits

BEAMS, TOKENS = (1, 4), 16
SENTENCES = 50  # for translators
WORDS = " ".join(TEXTS).split()
SIDES = ("made", "theirs", "ours")
TYPES = {"even": torch.float32, "wide": torch.float64}  # the type in which each drawing is compared
FEW = 2  # images of a model that writes no texts
Parts = list[Any]  # the parts of a saved model, the model itself first


def words() -> t.BertTokenizer:
    """Returns a tokenizer with BERT's vocabulary size."""
    syllables = [a + b + c for a in ascii_lowercase for b in ascii_lowercase for c in ascii_lowercase]
    pieces = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", *ascii_lowercase, *syllables]
    pieces += [f"##{piece}" for piece in (*ascii_lowercase, *syllables)]
    return t.BertTokenizer(vocab={piece: id for id, piece in enumerate(pieces[:30522])})


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


def distilbert_base() -> Parts:
    return [wide(t.DistilBertForMaskedLM(t.DistilBertConfig())), words()]


def roberta_base() -> Parts:
    config = t.RobertaConfig(vocab_size=50265, max_position_embeddings=514, type_vocab_size=1)
    tokenizer = byte_pairs(config.vocab_size - 4)
    named = {"bos_token": "<s>", "pad_token": "<pad>", "eos_token": "</s>", "mask_token": "<mask>"}
    tokenizer.add_special_tokens(named)
    return [wide(t.RobertaForMaskedLM(config)), tokenizer]


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


def siglip_base() -> Parts:
    model = t.SiglipForImageClassification(t.SiglipConfig(num_labels=1000))
    return [wide(model), t.SiglipImageProcessor()]


CAPTIONERS = {"vit_gpt2": vit_gpt2, "blip_base": blip_base, "git_base": git_base, **LINE_READERS}
WRITERS = CAPTIONERS | TRANSLATORS
MASKED = {"bert_base": bert_base, "distilbert_base": distilbert_base, "roberta_base": roberta_base}
READERS = MASKED | {"gpt2": gpt2}
SEERS = {
    **{"vit_base": vit_base, "deit_base": deit_base, "clip_base": clip_base, "dinov2_base": dinov2_base},
    "siglip_base": siglip_base,
}
MODELS: dict[str, Callable[[], Parts]] = WRITERS | READERS | SEERS | DECODERS


@torch.no_grad()
def even_out(model: nn.Module) -> None:
    """Redraws matrices so that activations keep their size."""
    tables = {id(module.weight) for module in model.modules() if isinstance(module, nn.Embedding)}
    for name, module in model.named_modules():
        if isinstance(module, nn.Linear | nn.Conv2d | Conv1D) and id(module.weight) not in tables:
            inputs = len(module.weight) if isinstance(module, Conv1D) else module.weight[0].numel()
            factor = model.config.d_kv**-0.5 if name.endswith("Attention.q") else 1  # T5 has the scale in its weights
            module.weight.normal_(std=factor * inputs**-0.5)


def make(name: str, drawing: str, folder: Path) -> dict[str, Any]:
    """Saves a model and returns its inputs."""
    torch.manual_seed(0)
    draw = Random(0)
    model, *others = MODELS[name]()
    if drawing == "even":
        even_out(model)
    for part in (model, *others):
        part.save_pretrained(folder / "model")
    paths = photos(folder / "photos", 8 if name in CAPTIONERS else FEW)
    results: dict[str, Any] = {"tokens": torch.randint(5, 30000, (len(paths), 12)), "kind": type(model).__name__}
    if name in TRANSLATORS:
        results["texts"] = [" ".join(draw.choices(WORDS, k=draw.randint(3, 15))) for _ in range(SENTENCES)]
    if name in CAPTIONERS | SEERS:
        results["pixels"] = others[-1]([Image.open(path) for path in paths], return_tensors="pt").pixel_values
    return results


def in_both(logits: Callable[[dict[str, Any]], Tensor], model: nn.Module, known: dict[str, Any]) -> dict[str, Tensor]:
    """Returns logits in float32 and in float64; the model stays in float64."""
    results = {"logits": logits(known)}
    model.double()
    exact = {key: value.double() if key == "pixels" else value for key, value in known.items()}
    results["exact"] = logits(exact)
    if "pixels" in exact:
        results["moved"] = logits(exact | {"pixels": exact["pixels"] * (1 + torch.finfo(torch.float64).eps)})
    return results


def exact_softmax(scores: Tensor, *args: Any, plain: Any = nn.functional.softmax, **options: Any) -> Tensor:
    """Softmax that stays in float64 for float64 inputs."""
    return plain(scores, *args, **options | ({"dtype": None} if scores.dtype == torch.float64 else {}))


@torch.inference_mode()
def theirs(name: str, draw: str, folder: Path, known: dict[str, Any]) -> dict[str, Any]:
    """Returns logits and texts of `transformers` from the folder that it saved."""
    nn.functional.softmax = exact_softmax  # type: ignore[assignment]
    model = getattr(t, known["kind"]).from_pretrained(folder / "model").eval()
    results: dict[str, Any] = {}
    if name in CAPTIONERS:
        tokenizer, options = t.AutoTokenizer.from_pretrained(folder / "model"), {"max_length": TOKENS}
        model, pixels = model.to(TYPES[draw]), known["pixels"].to(TYPES[draw])
        results["texts"] = {beam: write_captions(model, tokenizer, pixels, num_beams=beam, **options) for beam in BEAMS}
        model.float()
    if name in TRANSLATORS:
        tokenizer = t.AutoTokenizer.from_pretrained(folder / "model")
        known = known | {"read": dict(tokenizer(known["texts"][:FEW], return_tensors="pt", padding=True))}
        model = model.to(TYPES[draw])
        results["texts"] = {beam: their_tokens(model, tokenizer, known["texts"], beam, TOKENS) for beam in BEAMS}
        model.float()
    return results | in_both(partial(logits_of, name, model), model, known)


def logits_of(name: str, model: Any, known: dict[str, Any]) -> Tensor:
    """Returns logits of theirs, or states of an encoder alone."""
    if name in CAPTIONERS:
        return caption_logits(model, known["pixels"], known["tokens"])
    if name in READERS:
        return model(known["tokens"]).logits
    if name in TRANSLATORS:
        return model(**known["read"], decoder_input_ids=known["tokens"]).logits
    output = model(pixel_values=known["pixels"])
    if hasattr(output, "logits"):
        return output.logits
    states = output.last_hidden_state
    return model.post_layernorm(states) if hasattr(model, "post_layernorm") else states


@torch.inference_mode()
def ours(name: str, draw: str, folder: Path, known: dict[str, Any]) -> dict[str, Any]:
    """Returns logits and texts of ours from the same inputs."""
    from vlm.checkpoint.load import load_model, read
    from vlm.tasks.translation.predict import Translator

    place = str(folder / "model")
    if name in SEERS:
        seer = open_seer(place)
        return in_both(lambda known: states_of(seer(known["pixels"])), seer, known)
    if name in TRANSLATORS:
        ours = Translator(place, dtype=TYPES[draw])
        texts = {beam: our_tokens(ours, known["texts"], beam, TOKENS) for beam in BEAMS}
        ours.model.float()
        read = partial(translator_logits, ours, known["texts"][:FEW])
        return in_both(read, ours.model, known) | {"texts": texts}
    model = load_model(read(place))
    results = in_both(partial(our_logits, name, model), model, known)
    del model  # so that only one model is in memory
    return results | (our_texts(draw, folder, known) if name in CAPTIONERS else {})


def our_logits(name: str, model: Any, known: dict[str, Any]) -> Tensor:
    """Returns logits of our model for tokens."""
    tokens = known["tokens"]
    if name in CAPTIONERS:
        return model.head(model(known["pixels"], tokens))
    if name in MASKED:
        hidden = model(tokens, None, None, torch.arange(tokens.numel()))
        return model.head.logits(hidden).unflatten(0, tokens.shape)
    return model.head(model(tokens))


def our_texts(draw: str, folder: Path, known: dict[str, Any]) -> dict[str, Any]:
    """Returns our texts: from the image files if float32 is compared, from the same pixels if float64 is."""
    from vlm.data.images.image import load_image
    from vlm.tasks.captioning.predict import Captioner

    captioner = Captioner(str(folder / "model"), dtype=TYPES[draw])
    images = [captioner.pixels(load_image(path)) for path in sorted(map(str, (folder / "photos").iterdir()))]
    if draw == "wide":  # the last bit of a pixel would change texts
        captioner.encode = lambda inputs: captioner.model.encode(known["pixels"].double())  # type: ignore[method-assign]
    results: dict[str, Any] = {"texts": {}, "pixels": captioner.preprocess.normalize(torch.stack(images))}
    for beam in BEAMS:
        options = captioner.options(beam=beam, max_tokens=TOKENS - 1, batch_size=len(images))
        found = dict(captioner.results([images], options))
        results["texts"][beam] = [found[place][0].text for place in range(len(images))]
    return results


def open_seer(place: str) -> nn.Module:
    """Loads a classifier, or an encoder alone."""
    from vlm.checkpoint.hugging_face import describe_folder
    from vlm.checkpoint.load import load_model, read
    from vlm.checkpoint.rebuild import rebuild
    from vlm.models.pretrained.folder import Folder
    from vlm.models.pretrained.load import load_hugging_face

    specified, _ = describe_folder(Folder(place))
    if specified.model is not None:
        return load_model(read(place))
    encoder: nn.Module = rebuild(specified.parts["encoder"])
    load_hugging_face(encoder, Folder(place))
    return encoder.eval()


def states_of(output: Any) -> Tensor:
    """Returns logits unchanged, or the states of a context."""
    return output if isinstance(output, Tensor) else output.states


def compare(name: str, draw: str) -> bool:
    """Runs both sides in separate processes and prints a line; returns False if they differ."""
    with tempfile.TemporaryDirectory() as folder:
        for side in SIDES:
            inner = ["--side", side, "--draw", draw, "--folder", folder]
            subprocess.run([sys.executable, __file__, name, *inner], check=True)
        inputs, a, b = (torch.load(Path(folder) / side, weights_only=True) for side in SIDES)
    compared = "logits" if draw == "even" else "exact"
    exact, difference = a["exact"], (a[compared] - b[compared]).abs().max().item()
    deviation, (first, second) = exact.std().item(), exact.topk(2).values.unbind(-1)
    errors = [(results["logits"] - exact).abs().max().item() for results in (a, b)]
    shares = [f"{error:.1e} ({error / deviation:.1e})" for error in errors]
    words = [f"difference {difference:.1e}"]
    if "moved" in a:
        words.append(f"the last bit of pixels {(a['moved'] - exact).abs().max().item():.1e}")
    words.append(f"float32 from float64 theirs {shares[0]}, ours {shares[1]}")
    words += [f"deviation {deviation:.2f}, margin {(first - second).min().item():.1e}"]
    equal = difference <= 1e-4
    for beam in BEAMS if name in WRITERS else ():
        pairs = list(zip(a["texts"][beam], b["texts"][beam], strict=True))
        same, kinds = sum(one == other for one, other in pairs), len({str(one) for one in a["texts"][beam]})
        words.append(f"{'greedy' if beam == 1 else f'beam {beam}'} {same} of {len(pairs)} texts, {kinds} kinds")
        equal &= same == len(pairs)
    if "pixels" in b:
        words.append(f"pixels {(inputs['pixels'] - b['pixels']).abs().max().item():.1e}")
    kind = str(TYPES[draw]).removeprefix("torch.")
    print(f"{name} {draw} {kind}: {'equal' if equal else 'NOT EQUAL'}; {'; '.join(words)}", flush=True)
    return equal


def compare_decoder(name: str) -> bool:
    """Prints a row of `benchmarks/hub.py` for a decoder with weights drawn "even", in float32."""
    from hub import HEAD, compare_folder, row

    with tempfile.TemporaryDirectory() as folder:
        inner = ["--side", SIDES[0], "--draw", "even", "--folder", folder]
        subprocess.run([sys.executable, __file__, name, *inner], check=True)
        good, cells = compare_folder(f"{folder}/model", name, TOKENS // 2)
    print(row(HEAD), row(cells), "" if good else "NOT EQUAL", sep="\n", flush=True)
    return good


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*", metavar="NAME", help=", ".join(MODELS))
    parser.add_argument("--side", choices=SIDES, help=argparse.SUPPRESS)
    parser.add_argument("--draw", choices=TYPES, help="one drawing of the weights alone")
    parser.add_argument("--folder", type=Path, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if unknown := [name for name in options.names if name not in MODELS]:
        parser.error(f"{unknown[0]} is none of {', '.join(MODELS)}")
    if options.side is None:
        names, draws = options.names or MODELS, TYPES if options.draw is None else [options.draw]
        equal = [compare(name, draw) for name in names if name not in DECODERS for draw in draws]
        return 0 if all(equal + [compare_decoder(name) for name in names if name in DECODERS]) else 1
    [name], draw, folder = options.names, options.draw, options.folder
    if options.side == SIDES[0]:
        results = make(name, draw, folder)
    else:
        known = torch.load(folder / SIDES[0], weights_only=True)
        results = (theirs if options.side == "theirs" else ours)(name, draw, folder, known)
    torch.save(results, folder / options.side)
    return 0


if __name__ == "__main__":
    sys.exit(main())
