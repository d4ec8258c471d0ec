"""Pairs of evaluation samples, for a control that reads captions with the image of another sample."""

from vlm.data.records import Record, Split

BLOCK = 512  # maximum number of samples in a block within which pairs are formed


def block_of(index: int, size: int) -> range:
    """The block of a sample: a split is cut into equal blocks of at most BLOCK samples."""
    blocks = -(-size // BLOCK)
    number = ((index + 1) * blocks - 1) // size
    return range(number * size // blocks, (number + 1) * size // blocks)


def partner(index: int, size: int) -> int:
    """The sample half a block away, because neighbours may be similar. Each sample is the partner of exactly one."""
    block = block_of(index, size)
    return block[(index - block.start + len(block) // 2) % len(block)]


class Paired(Split):
    """A split whose records also hold their index ("place") and their partner ("other", with index "other_place")."""

    def __init__(self, split: Split) -> None:
        self.split = split

    def __len__(self) -> int:
        return len(self.split)

    def record(self, index: int, epoch: int = 0) -> Record:
        record, other = self.split.record(index, epoch), partner(index, len(self))
        pair = {"place": index, "other_place": other, "other": self.split.record(other, epoch)}
        record.known = {**record.known, **pair}
        return record
