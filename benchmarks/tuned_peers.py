"""Trains Hugging Face models with tuned loops within a time budget: a captioner and a language model.

They compute in bfloat16 if the CPU is faster in it, with fused AdamW, clipping and half a cosine. Pairs of photo and
caption are grouped by length with Hugging Face's own sampler. Its own processor resizes all photos beforehand, which is
not timed; half of them are mirrored.
"""

import statistics
from collections.abc import Iterator
from functools import cached_property
from itertools import takewhile
from typing import Any

import torch
from captioning import MAX_LEN, peer_loss, peer_model
from language_modeling import WINDOW, HuggingFace
from time_budget import BudgetedSchedule, Clock
from torch import Tensor, nn
from transformers import ViTImageProcessor
from transformers.trainer_pt_utils import LengthGroupedSampler

from vlm.evaluation.metrics.captions import CaptionMetric
from vlm.nn.device import has_bfloat16
from vlm.training.run.build import build_data, fill_preprocessing
from vlm.training.step.optim import Cosine

BFLOAT16 = has_bfloat16("cpu")
EVALUATED = 100  # photos, or pairs, per evaluation batch
Curve = list[dict[str, float]]


class Photos:
    """Photos of a split, resized by the peer's own processor, with their captions."""

    def __init__(self, data: Any, split: str) -> None:
        images, captions = data.fields["images"].preprocess, data.fields["captions"]
        records = [data.split(split).record(index) for index in range(len(data.split(split)))]
        size = dict(zip(("height", "width"), images.image_size, strict=True))
        resize = ViTImageProcessor(size=size, do_rescale=False, do_normalize=False)
        self.pixels = torch.cat([resize(record.image(), return_tensors="pt")["pixel_values"] for record in records])
        self.references = {record.id: record["references"] for record in records}
        pairs = [
            (photo, captions.encode_caption(text))
            for photo, record in enumerate(records)
            for text in record["captions"]
        ]
        self.photo = torch.tensor([photo for photo, _ in pairs])
        self.ids = nn.utils.rnn.pad_sequence([torch.tensor(ids) for _, ids in pairs], batch_first=True)
        self.lengths = [len(ids) for _, ids in pairs]

    def normal(self, photos: Tensor) -> Tensor:
        return self.pixels[photos] / 127.5 - 1

    def pairs(self, pairs: Tensor) -> tuple[Tensor, Tensor]:
        longest = max(self.lengths[pair] for pair in pairs.tolist())
        return self.normal(self.photo[pairs]), self.ids[pairs, :longest]


class Captions:
    """The peer of a captioner: its model, its batches, and its validation."""

    unit = "caption"

    def __init__(self, config: dict[str, Any], batch: int) -> None:
        self.config, self.batch = config, batch
        self.data = open_data(config)

    @cached_property
    def tokens(self) -> float:
        """Mean number of tokens per caption of the validation split, end token included."""
        records, encode = self.data.split("val").records(), self.data.fields["captions"].encode_caption
        return statistics.mean(len(encode(text)) - 1 for record in records for text in record["captions"])

    @property
    def validation_data(self) -> str:
        photos = self.data.split("val")
        return f"{len(photos)} photos with {sum(len(record['captions']) for record in photos.records())} captions"

    @cached_property
    def photos(self) -> dict[str, Photos]:
        return {split: Photos(self.data, split) for split in ("train", "val")}

    def model(self) -> nn.Module:
        size = self.config["model"]["size"] | {"image_size": self.config["data"]["image_size"]}
        model = peer_model(size, self.data.tokenizer.vocab_size)
        model.decoder.config.use_cache = False  # otherwise every training step would allocate a cache
        return model

    def batches(self) -> Iterator[tuple[Tensor, Tensor]]:
        photos = self.photos["train"]
        while True:
            order = torch.tensor(list(LengthGroupedSampler(self.batch, lengths=photos.lengths))).split(self.batch)
            for number in torch.randperm(len(order)).tolist():  # the sampler orders batches from long to short
                pixels, ids = photos.pairs(order[number])
                mirrored = torch.rand(len(pixels), 1, 1, 1) < 0.5
                yield torch.where(mirrored, pixels.flip(-1), pixels), ids

    @staticmethod
    def loss(model: nn.Module, pixels: Tensor, ids: Tensor) -> Tensor:
        return peer_loss(model, pixels, ids, bfloat16=BFLOAT16)

    def validate(self, model: Any) -> dict[str, float]:
        photos, metric, tokenizer = self.photos["val"], CaptionMetric(), self.data.tokenizer
        parts = torch.arange(len(photos.lengths)).split(EVALUATED)
        nats = sum(peer_loss(model, *photos.pairs(part), bfloat16=BFLOAT16, reduction="sum").item() for part in parts)
        ends = {"pad_token_id": tokenizer.pad_id, "eos_token_id": tokenizer.eos_id, "bos_token_id": tokenizer.bos_id}
        greedy = {"use_cache": True, "max_new_tokens": MAX_LEN - 1, "decoder_start_token_id": tokenizer.bos_id, **ends}
        texts = []
        for part in torch.arange(len(photos.pixels)).split(EVALUATED):
            with torch.autocast("cpu", torch.bfloat16, enabled=BFLOAT16):
                rows = model.generate(photos.normal(part), num_beams=1, do_sample=False, **greedy).tolist()
            texts += [tokenizer.decode(list(takewhile(lambda id: id != tokenizer.eos_id, row[1:]))) for row in rows]
        metric.update(list(photos.references), texts, list(photos.references.values()))
        return {"loss": nats / len(photos.lengths), "cider": metric.compute()["cider"]}


class Texts:
    """The peer of a character language model: its model, its batches, and its validation."""

    unit, tokens = "character", 1

    def __init__(self, config: dict[str, Any], batch: int) -> None:
        self.data, self.batch = open_data(config), batch

    @property
    def validation_data(self) -> str:
        return f"{self.data.fields['text'].counts('val').tokens} characters"

    def model(self) -> nn.Module:
        return HuggingFace(self.data.tokenizer.vocab_size)

    def batches(self) -> Iterator[tuple[Tensor, Tensor]]:
        ids = torch.tensor(self.data.fields["text"].tokens("train").tokens.astype("int64"))
        while True:
            windows = ids[torch.randint(len(ids) - WINDOW, (self.batch, 1)) + torch.arange(WINDOW + 1)]
            yield windows[:, :-1], windows[:, 1:]

    @staticmethod
    def logits(model: nn.Module, tokens: Tensor) -> Tensor:
        with torch.autocast("cpu", torch.bfloat16, enabled=BFLOAT16):
            return model(tokens).float()

    def loss(self, model: nn.Module, tokens: Tensor, labels: Tensor) -> Tensor:
        return nn.functional.cross_entropy(self.logits(model, tokens).flatten(0, 1), labels.flatten())

    def validate(self, model: nn.Module) -> dict[str, float]:
        nats = count = 0
        for rows in (batch["text"] for batch in self.data.eval_dataloader("val")):
            logits = rows.targets.pick(self.logits(model, rows.tokens[:, :-1]))
            nats += nn.functional.cross_entropy(logits, rows.targets.labels, reduction="sum").item()
            count += rows.targets.count
        return {"loss": nats / count}


def open_data(config: dict[str, Any]) -> Any:
    data = build_data(fill_preprocessing(config))
    data.prepare()
    return data


def train_peer(peer: Captions | Texts, clock: Clock, *, seed: int, rate: float) -> Curve:
    torch.manual_seed(seed)
    model, curve = peer.model().train(), []
    groups = [{"params": [p for p in model.parameters() if p.ndim > 1], "weight_decay": 0.1}]
    groups += [{"params": [p for p in model.parameters() if p.ndim == 1], "weight_decay": 0.0}]
    optimizer = torch.optim.AdamW(groups, lr=rate, betas=(0.9, 0.99), fused=True)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, BudgetedSchedule(Cosine(warmup=0.03), clock).factor)
    for batch in peer.batches():
        clock.go()
        peer.loss(model, *batch).backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        schedule.step()
        if clock.due:
            clock.pause()
            with torch.inference_mode():
                curve.append({"seconds": clock.seconds_spent, **peer.validate(model.eval())})
            model.train()
            if clock.is_over:
                break
    return curve
