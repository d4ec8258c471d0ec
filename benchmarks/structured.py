"""Compares the speed of sampling with a JSON schema and without one, in turns.

    python benchmarks/structured.py MODEL [--rows 1 8] [--tokens 128] [--rounds 5] [--precision fp32]

MODEL is a language model: a checkpoint, a folder or a GGUF file. The schema is an array of objects that is longer than
the texts, and no token ends a text, so that all texts have the same length in both cases. Prints tokens per second of
the best round of each, and their ratio.
"""

import argparse
import time

import vlm
from vlm.decoding.constraints import Rules
from vlm.decoding.continuation import continue_texts
from vlm.decoding.sampling import Sampling
from vlm.inference.command_options import GenerationOptions
from vlm.tasks.language_modeling.predict import TextGenerator, encode_prompt

ITEM = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 20},
        "color": {"enum": ["red", "green", "blue"]},
        "sizes": {"type": "array", "items": {"type": "integer"}, "maxItems": 4},
        "date": {"type": "string", "pattern": "^[0-9]{4}-[0-9]{2}$"},
    },
    "required": ["name", "color", "sizes", "date"],
    "additionalProperties": False,
}
SCHEMA = {"type": "array", "items": ITEM, "minItems": 1000}
PROMPT = "A list of things: "


def measure(generator: TextGenerator, rules: Rules, *, rows: int, tokens: int) -> float:
    """Returns tokens per second of `rows` texts of `tokens` tokens."""
    prompts = [encode_prompt(generator.tokenizer, f"{PROMPT}{row} ") for row in range(rows)]
    start, count = time.perf_counter(), 0
    for step in continue_texts(
        generator.model,
        prompts,
        sampling=Sampling(),
        max_tokens=tokens,
        eos_id=-1,
        seed=0,
        rules=rules,
    ):
        count += len(step)
    assert count == rows * tokens, "a text has ended before the maximum length"
    return count / (time.perf_counter() - start)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model")
    parser.add_argument("--rows", type=int, nargs="+", default=[1, 8])
    parser.add_argument("--tokens", type=int, default=128)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--precision", default="fp32")
    chosen = parser.parse_args()
    generator = vlm.load(chosen.model, device="cpu", precision=chosen.precision)._predictor
    assert isinstance(generator, TextGenerator), "MODEL is not a language model"
    start = time.perf_counter()
    grammar = generator.build_grammar(GenerationOptions(json_schema=SCHEMA))
    print(f"the schema and the vocabulary took {time.perf_counter() - start:.2f} s, once")
    for rows in chosen.rows:
        generator.prepack(rows)
        cases = {"without": Rules(), "with": Rules(grammar=grammar)}
        best = dict.fromkeys(cases, 0.0)
        for number in range(chosen.rounds + 1):
            for name, rules in cases.items():
                rate = measure(generator, rules, rows=rows, tokens=chosen.tokens)
                best[name] = max(best[name], rate) if number else 0.0  # the first round only warms up
        ratio = best["with"] / best["without"]
        print(f"{rows} rows: {best['without']:.1f} tokens/s without, {best['with']:.1f} with a schema: {ratio:.2f}")


if __name__ == "__main__":
    main()
