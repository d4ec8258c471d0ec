"""Compares the time of BLEU, ROUGE-L and CIDEr, tokenizers included, with pycocoevalcap's.

It needs Java and `pip install "vlm-lightning[coco]"`.

    python benchmarks/metrics.py [RESULTS.json REFERENCES.json]

Without files, 5,000 images with 5 references each are generated, with word frequencies that follow Zipf's law. Each
figure is the best of three rounds, in which both sides take turns.
"""

import json
import random
import sys
import time
from collections.abc import Callable
from contextlib import redirect_stdout
from io import StringIO
from pathlib import Path

from vlm.evaluation.metrics.coco import References

IMAGES, CAPTIONS, ROUNDS = 5000, 5, 3


def random_captions() -> tuple[dict[str, str], dict[str, list[str]]]:
    """Returns captions of about ten words from a vocabulary of 5,000, with frequencies that follow Zipf's law."""
    draw = random.Random(0)
    words = ["a", "the", "on", "in", *("".join(draw.choices("abcdefghiklmnoprstuw", k=6)) for _ in range(5000))]
    weights = [1 / place for place in range(1, len(words) + 1)]

    def caption() -> str:
        # The last word is long, because after "a." the reference tokenizer looks into the next caption (see ptb.py).
        body = draw.choices(words, weights, k=draw.randint(6, 13))
        return " ".join([*body, *draw.choices(words[4:], weights[4:])]).capitalize() + "."

    references = {str(image): [caption() for _ in range(CAPTIONS)] for image in range(IMAGES)}
    return {image: caption() for image in references}, references


def read(results: str, references: str) -> tuple[dict[str, str], dict[str, list[str]]]:
    texts: dict[str, list[str]] = {}
    for row in json.loads(Path(references).read_text())["annotations"]:
        texts.setdefault(str(row["image_id"]), []).append(row["caption"])
    return {str(row["image_id"]): row["caption"] for row in json.loads(Path(results).read_text())}, texts


def ours(predictions: dict[str, str], references: dict[str, list[str]]) -> list[float]:
    return list(References(references).score(predictions).summary().values())


def theirs(predictions: dict[str, str], references: dict[str, list[str]]) -> list[float]:
    from pycocoevalcap.bleu.bleu import Bleu
    from pycocoevalcap.cider.cider import Cider
    from pycocoevalcap.rouge.rouge import Rouge
    from pycocoevalcap.tokenizer.ptbtokenizer import PTBTokenizer

    with redirect_stdout(StringIO()):
        tokenizer = PTBTokenizer()
        wanted = tokenizer.tokenize({i: [{"caption": text} for text in texts] for i, texts in references.items()})
        candidates = tokenizer.tokenize({i: [{"caption": text}] for i, text in predictions.items()})
        bleu = Bleu(4).compute_score(wanted, candidates)[0]
        return [*bleu, Rouge().compute_score(wanted, candidates)[0], Cider().compute_score(wanted, candidates)[0]]


def time_call(function: Callable[[], object]) -> tuple[float, object]:
    start = time.perf_counter()
    result = function()
    return time.perf_counter() - start, result


def main(argv: list[str]) -> None:
    predictions, references = read(*argv) if argv else random_captions()
    print(f"{len(references):,} images, {sum(map(len, references.values())):,} references")
    prepared = References(references)
    rounds: dict[str, list[float]] = {"vlm": [], "vlm, references prepared": [], "pycocoevalcap": []}
    for _ in range(ROUNDS):
        second, own = time_call(lambda: ours(predictions, references))
        rounds["vlm"].append(second)
        rounds["vlm, references prepared"].append(time_call(lambda: prepared.score(predictions).summary())[0])
        try:
            second, other = time_call(lambda: theirs(predictions, references))
        except (ImportError, OSError) as error:
            print(f"pycocoevalcap cannot run here: {error}")
            continue
        rounds["pycocoevalcap"].append(second)
        print("largest difference of a score:", max(abs(a - b) for a, b in zip(own, other, strict=True)))  # type: ignore[call-overload]
    best = {name: min(times) for name, times in rounds.items() if times}
    for name, seconds in best.items():
        share = f"   {seconds / best['pycocoevalcap']:.2f} of pycocoevalcap's" if "pycocoevalcap" in best else ""
        print(f"{name:<26}{seconds:8.2f} s{share}")


if __name__ == "__main__":
    main(sys.argv[1:])
