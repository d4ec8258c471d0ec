"""Text for training and evaluating language models."""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from hashlib import blake2b
from itertools import chain, islice
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, NamedTuple, Protocol

from vlm.data.text.token_file import TokenFile, open_tokens
from vlm.data.text.tokenizer import Tokenizer, tokenizer_from_state
from vlm.data.text.windows import RandomWindows, SlidingWindows, TextBatch, Windows
from vlm.errors import Count, Supplied, UserError
from vlm.randomness import key, numpy_rng
from vlm.training.data_module import Data, Workers

LEARNED_FROM = 2**26  # bytes of text, about, that are enough to learn a tokenizer from


class TextSource(Protocol):
    """A corpus. `skipped` names what was left out of it, a line each."""

    splits: tuple[str, ...]
    skipped: Sequence[str]

    def documents(self, split: str) -> Iterator[Iterable[str]]:
        """The lines of each document, one or more, with their line ends; in the same order in every run."""

    def size(self, split: str) -> int:
        """Bytes of the split, about; 0 where unknown."""

    def signature(self) -> str:
        """Tells this content and its splits from any other, without reading it all."""


class Counts(NamedTuple):
    """What a loss over a whole split is divided by: scored tokens (all but each document's first), bytes, words."""

    tokens: int
    bytes: int
    words: int


class TextSplit:
    """A split as a number of tokens; they are written when it is first asked for."""

    def __init__(self, name: str, tokens: Callable[[str], TokenFile]) -> None:
        self.name, self._tokens = name, tokens

    def __len__(self) -> int:
        return self._tokens(self.name).header.tokens


class TextData(Data):
    """Text for training and evaluating language models.

    Args:
        source: The corpus.
        tokenizer: Learned from the training split unless it already is.
        max_len: Tokens that a model reads at once.
        stride: Tokens that the window of an evaluation moves on by: fewer give each more context and take longer; None
            for half of max_len.
        train_samples: Train on the first so many windows alone, the same in every epoch; None for all. Evaluation of
            the training split then reads these too.
        cache: Folder where tokens and learned tokenizers are kept; None for none, at the cost of doing it anew.
        batch_size, eval_batch_size, num_workers, seed: As in Data; samples are windows.
    Raises:
        UserError: A number is out of range.
    """

    supplies = ("tokenizer",)

    def __init__(
        self,
        *,
        source: TextSource,
        tokenizer: Supplied[Tokenizer],
        batch_size: Count,
        eval_batch_size: Count,
        num_workers: Workers,
        max_len: Count,
        seed: Supplied[int],
        stride: Count | None = None,
        train_samples: Count | None = None,
        cache: Supplied[str | None] = None,
    ) -> None:
        super().__init__(
            splits={name: TextSplit(name, self.tokens) for name in source.splits},
            batch_size=batch_size,
            eval_batch_size=eval_batch_size,
            num_workers=num_workers,
            seed=seed,
        )
        self.source, self.tokenizer, self.max_len = source, tokenizer, max_len
        self.stride = max(1, max_len // 2) if stride is None else stride
        self.train_samples, self.cache = train_samples, cache
        self._scratch = TemporaryDirectory(prefix="vlm-tokens-") if cache is None else None
        self._files: dict[str, TokenFile] = {}
        for name in ("max_len", "batch_size", "eval_batch_size", "train_samples"):
            if (value := getattr(self, name)) is not None and value < 1:
                raise UserError(f"data.{name}: {value} is too small; give at least 1")
        if not 1 <= self.stride <= max_len:
            raise UserError(f"data.stride: {self.stride} skips tokens; give 1 to data.max_len, which is {max_len}")

    @property
    def sizes(self) -> dict[str, int]:
        return {"vocab_size": self.tokenizer.vocab_size}

    @property
    def skipped(self) -> Sequence[str]:
        return self.source.skipped

    def prepare(self) -> None:
        """Learns the tokenizer from the training split, and encodes all splits, so that a fault shows at once."""
        lines = chain.from_iterable(self.source.documents("train"))
        step = max(1, self.source.size("train") // LEARNED_FROM)
        self.tokenizer.fit(islice(lines, 0, None, step), cache=Path(self.cache) if self.cache else None)
        for name in self.source.splits:
            self.tokens(name)
        self.dataset("train", augmented=True)

    def restore(self, about: Mapping[str, Any]) -> None:
        self.tokenizer = tokenizer_from_state(about["tokenizer"])
        self._files.clear()
        self._datasets.clear()

    def fingerprint(self) -> str:
        """A hash of the training split's ids."""
        header = self.tokens("train").header
        return f"{key(header.digest, header.tokens, header.tokenizer):016x}"

    def tokens(self, name: str) -> TokenFile:
        """The token ids of a split, from the cache where they are.

        Raises:
            UserError: There is no such split, its text cannot be read or its tokens written, or it holds no text.
        """
        self.split(name)
        if name not in self._files:
            parts = "\0".join([self.source.signature(), name, self.tokenizer.fingerprint])
            folder = Path(self.cache or self._scratch.name)  # type: ignore[union-attr]
            path = folder / f"{name}-{blake2b(parts.encode(), digest_size=16).hexdigest()}.tokens"
            file = open_tokens(path, self.source.documents(name), self.tokenizer, size=self.source.size(name))
            if not file.header.bytes:
                raise UserError(f"data: the split {name} holds no text; add some to its file or folder")
            self._files[name] = file
        return self._files[name]

    def counts(self, name: str) -> Counts:
        """How much text a split is, and how many of its tokens an evaluation of the whole scores."""
        header = self.tokens(name).header
        return Counts(header.tokens - header.documents, header.bytes, header.words)

    def open_dataset(self, name: str, *, augmented: bool) -> Windows:
        """Random windows for training, sliding ones for evaluation."""
        options = {"name": name, "file": self.tokens(name), "tokenizer": self.tokenizer, "max_len": self.max_len}
        if augmented or (name == "train" and self.train_samples is not None):
            return RandomWindows(seed=self.seed, limit=self.train_samples, **options)
        return SlidingWindows(stride=self.stride, **options)

    def collate(self) -> Callable[[Any], Any]:
        return _whole

    def sampled_windows(self, name: str, batches: int, batch_size: int, seed: int) -> Iterator[TextBatch]:
        """Batches of random windows, all tokens scored: what nanoGPT estimates its losses from.

        Args:
            batches, batch_size: How many batches, of how many windows.
            seed: Key of the windows, with the name of the split and the number of the batch.
        """
        windows = self.dataset(name)
        for number in range(batches):
            rng = numpy_rng(seed, "sampled windows", name, number)
            yield windows.read(rng.integers(windows.starts, size=batch_size))


def _whole(batch: TextBatch) -> TextBatch:
    return batch
