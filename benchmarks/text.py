"""Compares text tasks with Hugging Face's BERT of the same sizes: a training step each, and decoding of translations.

    python benchmarks/text.py [--only tagging] [--bucket 1] [--block 5] [--rounds 8] [--device cuda]

"Ours" is a step of `python train.py task=T`, with Lightning, logging and progress bar. The peer is a bare step of
transformers' BertForSequenceClassification, BertForTokenClassification, BertForQuestionAnswering, BertForMaskedLM or
EncoderDecoderModel of two BERTs: autocast, clipping, fused AdamW. Both read the same texts as ids in memory, in
bfloat16 if the device is faster in it. Ours packs several texts into a row; the peer has one row per text, padded to
the longest and made before timing. Texts of a batch have similar lengths, as both would sort them; with --bucket 1 they
are unsorted, which is the default of transformers' Trainer. Blocks of steps of both sides alternate in one process;
ratios are medians over blocks. Decoding is compared with `generate`, with the same texts, weights of the same type, and
32 tokens each, because there is no end token. Words follow Zipf's law; lengths are about those of reviews, sentences,
passages and captions.
"""

import argparse
import csv
import json
import os
import sys
import tempfile
from collections.abc import Callable, Iterator
from itertools import cycle, islice
from pathlib import Path
from typing import Any

from vlm.machine import tune

tune()  # applies to both sides
os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")
sys.path.insert(0, str(Path(__file__).parent))

import numpy as np
import torch
import transformers as hf
from generate import BOS, TOKENS, side_by_side
from interleaved import InterleavedTimer, report
from torch import Tensor, nn

from vlm.config.compose import compose
from vlm.data.batch import Batch, InputRows
from vlm.decoding.loop import decode_batch
from vlm.decoding.options import Decoding
from vlm.nn.device import has_bfloat16
from vlm.nn.step.packed import prepack, prepack_for_decoding
from vlm.training.run.build import build_model
from vlm.training.run.run import Run
from vlm.training.run.train import silence_libraries

DIM, HEADS, DEPTH, DROPOUT, VOCAB, MAX_LEN = 256, 4, 4, 0.1, 8000, 256
READ = 16  # batches that are used in turn
BEAMS = {"greedy, 32 texts": (1, 32), "5 beams, 8 texts": (5, 8)}
BERT = ["model/encoder=text_bert", f"model.size.mlp_ratio={4.0}"]


class Words:
    """Generates texts of random words."""

    def __init__(self) -> None:
        self.rng = np.random.default_rng(0)
        syllables = [first + vowel for first in "bdfgklmnprstvz" for vowel in "aeiou"]
        lengths = self.rng.integers(1, 4, 12_000)
        self.words = sorted({"".join(self.rng.choice(syllables, length)) for length in lengths})
        self.rng.shuffle(self.words)
        self.shares = 1 / np.arange(3, len(self.words) + 3)
        self.shares /= self.shares.sum()

    def __call__(self, mean: int, least: int = 3) -> list[str]:
        """Returns the words of a text with this mean length."""
        length = max(least, round(self.rng.gamma(4.0, mean / 4)))
        return self.rng.choice(self.words, length, p=self.shares).tolist()


def write_table(folder: Path, words: Words, mean: int) -> list[str]:
    with (folder / "texts.csv").open("w", newline="") as file:
        rows = csv.writer(file)
        rows.writerow(["text", "label"])
        rows.writerows([" ".join(words(mean)), "ab"[number % 2]] for number in range(3000))
    return ["data=texts", f"data.path={folder / 'texts.csv'}"]


def write_conll(folder: Path, words: Words, mean: int) -> list[str]:
    sentences = (
        "".join(f"{word}\ttag{(ord(word[0]) + len(word)) % 17}\n" for word in words(mean)) for _ in range(3000)
    )
    (folder / "tags.tsv").write_text("\n".join(sentences))
    return ["data=conll", f"data.path={folder / 'tags.tsv'}"]


def write_squad(folder: Path, words: Words, mean: int) -> list[str]:
    passages = []
    for number in range(2000):
        passage = words(mean, 20)
        start = int(words.rng.integers(len(passage) - 3))
        answer = {
            "text": " ".join(passage[start : start + 3]),
            "answer_start": len(" ".join(passage[:start])) + (start > 0),
        }
        question = {"id": str(number), "question": " ".join(words(10)), "answers": [answer]}
        passages.append({"context": " ".join(passage), "qas": [question]})
    (folder / "questions.json").write_text(json.dumps({"data": [{"paragraphs": passages}]}))
    return ["data=squad", f"data.path={folder / 'questions.json'}", "data.stride=64"]


def write_pairs(folder: Path, words: Words, mean: int) -> list[str]:
    for split, count in (("train", 3000), ("val", 50), ("test", 50)):
        for ending in ("en", "de"):
            (folder / f"{split}.{ending}").write_text("".join(" ".join(words(mean)) + "\n" for _ in range(count)))
    return ["data=aligned", f"data.root={folder}", "data.from=en", "data.to=de"]


def bert(vocab_size: int, **more: Any) -> hf.BertConfig:
    sizes = {"hidden_size": DIM, "num_hidden_layers": DEPTH, "num_attention_heads": HEADS, "intermediate_size": 4 * DIM}
    rates = {"hidden_dropout_prob": DROPOUT, "attention_probs_dropout_prob": DROPOUT}
    return hf.BertConfig(vocab_size=vocab_size, max_position_embeddings=MAX_LEN, **sizes, **rates, **more)


def two_berts(vocab_size: int) -> hf.EncoderDecoderModel:
    decoder = hf.BertLMHeadModel(bert(vocab_size, is_decoder=True, add_cross_attention=True))
    model = hf.EncoderDecoderModel(
        hf.EncoderDecoderConfig.from_encoder_decoder_configs(bert(vocab_size), decoder.config)
    )
    model.generation_config.update(decoder_start_token_id=BOS, bos_token_id=BOS, eos_token_id=None, pad_token_id=0)
    return model


def unpack_rows(rows: InputRows, values: Tensor, fill: int) -> Tensor:
    """Unpacks values of tokens into one row per text, padded to the longest."""
    own = values.masked_fill(rows.segments == 0, fill)
    if rows.layout is not None:
        own = own.flatten()[rows.layout.clamp(min=0)].masked_fill(rows.layout < 0, fill)
    return own[:, : max(map(len, rows.ids()))].contiguous()


def read(rows: InputRows) -> dict[str, Tensor]:
    types = {} if rows.types is None else {"token_type_ids": unpack_rows(rows, rows.types, 0)}
    seen = unpack_rows(rows, torch.ones_like(rows.tokens), 0)
    return {"input_ids": unpack_rows(rows, rows.tokens, 0), "attention_mask": seen, **types}


def label_tokens(rows: InputRows, labels: Tensor) -> dict[str, Tensor]:
    """Returns the peer's inputs with labels for some tokens, and -100 for all others."""
    every = torch.full_like(rows.tokens, -100)
    every.view(-1)[rows.places] = labels
    return {**read(rows), "labels": unpack_rows(rows, every, -100)}


def translation_inputs(batch: Batch) -> dict[str, Tensor]:
    tokens, seen = batch["translation"].tokens, batch["translation"].segments > 0
    labels = tokens.masked_fill(~seen, -100)[:, 1:].contiguous()
    return {**read(batch["text"]), "decoder_input_ids": tokens[:, :-1], "labels": labels}


def spans(batch: Batch) -> dict[str, Tensor]:
    starts, ends = batch["questions"].ends.unbind(1)
    return {**read(batch["questions"]), "start_positions": starts, "end_positions": ends}


# Of each task: writer of its data, mean length in words, our model, the peer, and the peer's inputs from a batch.
Task = tuple[Callable[..., list[str]], int, list[str], Callable[[int], nn.Module], Callable[[Batch], dict[str, Tensor]]]
TASKS: dict[str, Task] = {
    "text_classification": (
        write_table,
        20,
        ["model=text_classifier_small", "model.transform=true", *BERT],
        lambda vocab: hf.BertForSequenceClassification(bert(vocab, num_labels=2)),
        lambda batch: {**read(batch["texts"]), "labels": batch["labels"]},
    ),
    "tagging": (
        write_conll,
        17,
        ["model=tagger_small", *BERT],
        lambda vocab: hf.BertForTokenClassification(bert(vocab, num_labels=17)),
        lambda batch: label_tokens(batch["words"], batch["tags"].labels),
    ),
    "span_answering": (
        write_squad,
        110,
        ["model=span_answerer_small", "model/position=learned", *BERT],
        lambda vocab: hf.BertForQuestionAnswering(bert(vocab)),
        spans,
    ),
    "masked_language_modeling": (
        write_table,
        80,
        ["model=masked_lm_small", *BERT],
        lambda vocab: hf.BertForMaskedLM(bert(vocab)),
        lambda batch: label_tokens(batch["texts"], batch["texts"].labels),
    ),
    "translation": (write_pairs, 14, ["model=translator_bert"], two_berts, translation_inputs),
}


class InTurn:
    """A loader that repeats batches in memory; nothing waits for data."""

    asked = waited = 0.0

    def __init__(self, batches: list[Batch]) -> None:
        self.batches = batches

    def __len__(self) -> int:
        return 1_000_000

    def __iter__(self) -> Iterator[Batch]:
        return islice(cycle(self.batches), len(self))


def peer_step(model: nn.Module, batches: Iterator[dict[str, Tensor]], device: str) -> Callable[[], None]:
    """Returns a function that takes one training step of the peer."""
    optimizer = torch.optim.AdamW(model.to(device).train().parameters(), lr=1e-4, fused=True)

    def step() -> None:
        inputs = {name: value.to(device) for name, value in next(batches).items()}
        with torch.autocast(device, torch.bfloat16, enabled=has_bfloat16(device)):
            loss = model(**inputs).loss
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)

    return step


def shapes(batches: list[Batch], padded: list[dict[str, Tensor]]) -> str:
    """Returns the number of rows and the share of padding of both sides, for display."""
    fields = [next(value for value in one.values.values() if isinstance(value, InputRows)) for one in batches]
    own = [one.segments > 0 for one in fields], [one["attention_mask"] > 0 for one in padded]
    counts = [(sum(map(len, one)), 1 - sum(s.sum() for s in one) / sum(s.numel() for s in one)) for one in own]
    return " and ".join(f"in {rows} rows with {padding:.0%} padding" for rows, padding in counts)


def sizes_of(task: str) -> list[str]:
    depths = [
        f"model.size.{side}_depth={DEPTH}" for side in ("encoder", *(["decoder"] if task == "translation" else []))
    ]
    return [f"model.size.dim={DIM}", f"model.size.num_heads={HEADS}", f"model.size.dropout={DROPOUT}", *depths]


def train(task: str, *, batch: int, bucket: int, block: int, rounds: int, device: str) -> dict[str, float]:
    """Compares a training step of both sides."""
    write, mean, model, peer, inputs = TASKS[task]
    with tempfile.TemporaryDirectory() as place:
        data = write(Path(place), Words(), mean)
        options = [
            f"task={task}",
            *data,
            *model,
            *sizes_of(task),
            f"data.max_len={MAX_LEN}",
            f"data.batch_size={batch}",
            f"data.bucket={bucket}",
        ]
        options += [
            f"tokenizer.vocab_size={VOCAB}",
            "optim=adamw",
            "optim.lr=1e-4",
            "schedule=constant",
            f"runs={place}/runs",
        ]
        options += ["trainer=gpu" if device == "cuda" else "trainer=cpu", "trainer.limit_val_batches=0", "test=false"]
        run = Run(compose(options))
        batches = list(islice(run.data.train_dataloader(), READ))
        run.data.train_dataloader = lambda: InTurn(batches)  # type: ignore[method-assign,assignment]
        theirs = peer(run.data.sizes["vocab_size"])
        padded = [inputs(one) for one in batches]
        taken = cycle(padded)
        timed = InterleavedTimer(peer_step(theirs, taken, device), block=block, rounds=rounds, device=device)
        run.trainer.callbacks.append(timed)
        run.fit()
        weights = [sum(p.numel() for p in one.parameters()) for one in (run.task.model, theirs)]
    print(f"{task}: weights {weights[0]:,} and {weights[1]:,}; texts {shapes(batches, padded)}", flush=True)
    return timed.result()


@torch.inference_mode()
def decode(beam: int, texts: int, *, rounds: int, device: str) -> dict[str, float]:
    """Compares translations of 32 tokens by both sides."""
    config = compose(["task=translation", "model=translator_bert", *sizes_of("translation"), f"data.max_len={MAX_LEN}"])
    dtype = torch.bfloat16 if has_bfloat16(device) else torch.float32
    ours = build_model(config, {"vocab_size": VOCAB})[0].eval().to(device, dtype)
    theirs = two_berts(VOCAB).eval().to(device, dtype)
    if device == "cpu":
        prepack(ours.encoder)
        prepack_for_decoding(ours.decoder, rows=beam * texts)
    lengths = torch.randint(10, 30, (texts, 1), generator=torch.Generator().manual_seed(0))
    seen = (torch.arange(30) < lengths).long().to(device)
    tokens = torch.randint(3, VOCAB, (texts, 30), device=device) * seen
    decoding = Decoding(beam=beam, max_tokens=TOKENS - 1, logprobs=False)  # one more step is taken for the end token
    options = {"attention_mask": seen, "max_new_tokens": TOKENS, "num_beams": beam, "do_sample": False}

    def translations() -> list[list[int]]:
        written = decode_batch(ours.decoder, ours.encode(tokens, seen), decoding, bos_id=BOS, eos_id=-1)
        return [text[0].tokens for text in written]

    def peer() -> list[list[int]]:
        return theirs.generate(tokens, **options)[:, 1:TOKENS].tolist()

    return side_by_side(translations, rounds=rounds, peer=peer)["peer"]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="+", choices=[*TASKS, "decoding"], default=[*TASKS, "decoding"])
    parser.add_argument("--batch", type=int, default=32)
    parser.add_argument("--bucket", type=int, default=32, help="batches that are sorted by length together")
    parser.add_argument("--block", type=int, default=5)
    parser.add_argument("--rounds", type=int, default=8)
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--out")
    args = parser.parse_args()
    silence_libraries()
    options = {name: getattr(args, name) for name in ("batch", "bucket", "block", "rounds", "device")}
    rows = {task: train(task, **options) for task in args.only if task != "decoding"}
    if "decoding" in args.only:
        rows |= {name: decode(*sizes, rounds=args.rounds, device=args.device) for name, sizes in BEAMS.items()}
    report(rows, args.out)


if __name__ == "__main__":
    main()
