"""Compares published folders of the Hugging Face hub as read by `transformers` and by vlm.

    python benchmarks/hub.py                          # the ten of FOLDERS, which are downloaded
    python benchmarks/hub.py FOLDER hf:ORG/NAME ...   # local folders, or others of the hub

Both sides read each folder in float32 on a CPU, each in its own process. One line per folder: the largest difference of
logits (for an encoder: of states) and their standard deviation; the number of equal greedy and beam-4 texts, and of
"wrong" greedy texts, which first differ where the two likeliest tokens of `transformers` are more than 1e-3 apart; how
many of 1,000 lines have equal ids; the largest difference of pixels; seconds from the start of loading to the end; and
peak memory.
"""

import argparse
import resource
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1] / "tests" / "helpers"))

import torch
import transformers as t
from hugging import caption_logits, photos
from PIL import Image
from text_lines import varied_lines

FOLDERS = [
    "hf:HuggingFaceTB/SmolLM2-135M-Instruct",
    "hf:TinyLlama/TinyLlama-1.1B-Chat-v1.0",
    "hf:Qwen/Qwen2-0.5B-Instruct",
    "hf:Qwen/Qwen3-0.6B",
    "hf:openai-community/gpt2",
    "hf:Salesforce/blip-image-captioning-base",
    "hf:microsoft/git-base-coco",
    "hf:sentence-transformers/all-MiniLM-L6-v2",
    "hf:facebook/dinov2-small",
    "hf:openai/clip-vit-base-patch32",
]
PROMPTS = [
    *("The capital of France is", "Once upon a time", "def fibonacci(n):", "In 1969, people first"),
    *("Der Hund läuft", "1, 2, 3, 4,", "Dear Sir or Madam,", "Water boils at"),
]
LINES, BEAMS, TIE = 1000, (1, 4), 1e-3
SIDES = ("theirs", "ours")
Results = dict[str, Any]


@torch.inference_mode()
def theirs(folder: str, task: str, work: Path, tokens: int) -> Results:
    """Returns the results of `transformers` for a folder."""
    config = t.AutoConfig.from_pretrained(folder)
    model = getattr(t, config.architectures[0]).from_pretrained(folder, dtype=torch.float32).eval()
    results: Results = {}
    images = [Image.open(path) for path in photos(work / "photos")]
    if "vision_config" in config or task in ("captioning", "classification") or not hasattr(config, "vocab_size"):
        results["pixels"] = t.AutoImageProcessor.from_pretrained(folder)(images, return_tensors="pt").pixel_values
    if "pixels" not in results or task == "captioning":
        tokenizer = t.AutoTokenizer.from_pretrained(folder)
        options: Any = {"add_special_tokens": False, "split_special_tokens": True, "verbose": False}
        results["ids"] = tokenizer(varied_lines(LINES), **options).input_ids
        results["prompts"] = [tokenizer(prompt).input_ids for prompt in PROMPTS]
    if task == "captioning":
        results["tokens"] = torch.tensor([row[:6] for row in results["prompts"] if len(row) >= 6][:1]).expand(8, -1)
        results["logits"] = [caption_logits(model, results["pixels"], results["tokens"])]
        inputs: list[Any] = [{"pixel_values": pixels[None]} for pixels in results["pixels"]]
    elif task == "language_modeling":
        results["logits"] = [model(torch.tensor([row])).logits for row in results["prompts"]]
        inputs = [{"input_ids": torch.tensor([row])} for row in results["prompts"]]
    elif "pixels" in results:
        inputs, tower = [], getattr(model, "vision_model", model)
        output = tower(pixel_values=results["pixels"])
        states = output.logits if hasattr(output, "logits") else output.last_hidden_state
        results["logits"] = [tower.post_layernorm(states) if hasattr(tower, "pre_layrnorm") else states]
    else:
        inputs = []
        results["logits"] = [model.base_model(torch.tensor([row])).last_hidden_state for row in results["prompts"]]
    results["texts"] = {
        beam: [_generate_text(model, tokenizer, one, beam, tokens) for one in inputs] for beam in BEAMS if inputs
    }
    return results


def _generate_text(
    model: Any, tokenizer: Any, inputs: dict[str, Any], beam: int, tokens: int
) -> tuple[str, list[str], list[float]]:
    """Returns a text, its prefixes token by token, and the gap of the two likeliest tokens at each step."""
    more: Any = {"output_scores": True, "return_dict_in_generate": True, "do_sample": False, "num_beams": beam}
    found = model.generate(**inputs, max_new_tokens=tokens, **more)
    before = inputs["input_ids"].shape[1] if "input_ids" in inputs else 0
    row = found.sequences[0, before:].tolist()
    if beam > 1:
        return tokenizer.decode(row, skip_special_tokens=True), [], []
    texts = [tokenizer.decode(row[:end], skip_special_tokens=True) for end in range(1, len(row) + 1)]
    gaps = [(pair[0] - pair[1]).item() for pair in (scores[0].topk(2).values for scores in found.scores)]
    return texts[-1] if texts else "", texts, gaps[-len(texts) :]


@torch.inference_mode()
def ours(folder: str, task: str, known: Results, tokens: int) -> Results:
    """Returns the results of vlm for a folder, from the same prompts and pixels."""
    import vlm

    predictor: Any = vlm.load(folder, device="cpu", precision="fp32")._predictor
    model, results = predictor.model, Results()
    if "ids" in known:
        results["ids"] = [predictor.tokenizer.encode(line) for line in varied_lines(LINES)]
    if "pixels" in known:
        paths = sorted((Path(known["work"]) / "photos").iterdir())
        made = torch.stack([predictor.prepare(path, None) for path in paths])
        results["pixels"] = predictor.preprocess.normalize(made)
    if task == "captioning":
        results["logits"] = [model.head(model(known["pixels"], known["tokens"]))]
        inputs: list[Any] = list(made)
    elif task == "language_modeling":
        results["logits"] = [model.head(model(torch.tensor([row]))) for row in known["prompts"]]
        inputs = PROMPTS
    else:
        inputs, encoder = [], getattr(model, "encoder", model)
        batches = [known["pixels"]] if "pixels" in known else [torch.tensor([row]) for row in known["prompts"]]
        reader = model if task == "classification" else encoder
        results["logits"] = [getattr(out, "states", out) for out in map(reader, batches)]
    results["texts"] = {}
    for beam in BEAMS if inputs else ():
        options = predictor.options(beam=beam, sample=False if beam == 1 else None, max_tokens=tokens)
        found = dict(predictor.results([inputs], options))
        results["texts"][beam] = [found[place][0].text for place in range(len(inputs))]
    return results


def compare_folder(folder: str, name: str, tokens: int) -> tuple[bool, list[str]]:
    """Runs both sides; returns whether all results are equal, and the cells of a row."""
    from vlm.checkpoint.hugging_face import describe_folder
    from vlm.models.pretrained.load import open_folder

    _, about = describe_folder(open_folder(folder))
    with tempfile.TemporaryDirectory() as work:
        for side in SIDES:
            words = [folder, "--side", side, about["task"], work, "--tokens", str(tokens)]
            subprocess.run([sys.executable, __file__, *words], check=True)
        a, b = (torch.load(Path(work) / side, weights_only=True) for side in SIDES)
    pairs = list(zip(a["logits"], b["logits"], strict=True))
    difference = max((one - other).abs().max().item() for one, other in pairs)
    good, cells = difference <= 1e-4, [name, about["origin"], f"{difference:.1e}"]
    cells.append(f"{torch.cat([one.flatten() for one, _ in pairs]).std().item():.2f}")
    for beam in BEAMS:
        texts = list(zip(a["texts"].get(beam, []), b["texts"].get(beam, []), strict=True))
        unlike = [(one, other) for one, other in texts if one[0].strip() != other.strip()]
        wrong = sum(_differs_clearly(one, other) for one, other in unlike)
        good &= not wrong and len(unlike) <= 0.02 * len(texts)
        cells.append(f"{len(texts) - len(unlike)} of {len(texts)}, {wrong} wrong" if texts else "")
    ids = sum(one == other for one, other in zip(a.get("ids", []), b.get("ids", []), strict=True))
    good &= ids == len(a.get("ids", []))
    cells.append(f"{ids} of {len(a['ids'])}" if "ids" in a else "")
    cells.append(f"{(a['pixels'] - b['pixels']).abs().max().item():.1e}" if "pixels" in a else "")
    cells += [f"{a['seconds']:.0f}, {b['seconds']:.0f}", f"{a['memory']:.2f}, {b['memory']:.2f}"]
    return good, cells


def _differs_clearly(one: tuple[str, list[str], list[float]], other: str) -> bool:
    """Returns True if a greedy text differs from theirs where their two likeliest tokens are more than TIE apart."""
    _, beginnings, gaps = one
    at = next((at for at, text in enumerate(beginnings) if not other.startswith(text.rstrip("\ufffd"))), len(gaps) - 1)
    return bool(gaps) and gaps[at] > TIE


HEAD = ["folder", "class", "difference", "deviation", "greedy", "beam 4", "ids", "pixels", "seconds", "GB"]


def row(cells: list[str]) -> str:
    return f"| {' | '.join(cells)} |"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("places", nargs="*", metavar="FOLDER", help=f"by default {', '.join(FOLDERS)}")
    parser.add_argument("--tokens", type=int, default=24, help="new tokens of a text")
    parser.add_argument("--side", nargs=3, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.side is not None:
        [folder], (side, task, work) = options.places, options.side
        start = time.monotonic()
        if side == SIDES[0]:
            results = theirs(folder, task, Path(work), options.tokens)
        else:
            known = torch.load(Path(work) / SIDES[0], weights_only=True)
            results = ours(folder, task, known | {"work": work}, options.tokens)
        results["seconds"] = time.monotonic() - start
        results["memory"] = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20
        torch.save(results, Path(work) / side)
        return 0
    from vlm.checkpoint.locate import download
    from vlm.errors import UserError

    print(row(HEAD), row(["---"] * len(HEAD)), sep="\n", flush=True)
    failed = 0
    for place in options.places or FOLDERS:
        try:
            good, cells = compare_folder(str(download(place)), place, options.tokens)
        except (UserError, subprocess.CalledProcessError) as fault:
            good, cells = False, [place, str(fault).splitlines()[0]]
        print(row(cells) + ("" if good else "  NOT EQUAL"), flush=True)
        failed += not good
    return min(failed, 1)


if __name__ == "__main__":
    sys.exit(main())
