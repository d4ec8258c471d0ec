"""Samples of an evaluation in pairs: a captioner's control reads the captions of one beside the image of another."""

from vlm.data.records import Record, Split

BLOCK = 512  # samples among which pairs are drawn, at most


def block_of(index: int, size: int) -> range:
    """The block of a sample: a split of this size is cut into equal ones, of at most BLOCK samples each."""
    blocks = -(-size // BLOCK)
    number = ((index + 1) * blocks - 1) // size
    return range(number * size // blocks, (number + 1) * size // blocks)


def partner(index: int, size: int) -> int:
    """The sample half a block away, since neighbours may be alike. Each sample of a block is the partner of one."""
    block = block_of(index, size)
    return block[(index - block.start + len(block) // 2) % len(block)]


class Paired(Split):
    """A split whose records know their index, "place", and their partner: "other", with its index, "other_place"."""

    def __init__(self, split: Split) -> None:
        self.split = split

    def __len__(self) -> int:
        return len(self.split)

    def record(self, index: int, epoch: int = 0) -> Record:
        record, other = self.split.record(index, epoch), partner(index, len(self))
        pair = {"place": index, "other_place": other, "other": self.split.record(other, epoch)}
        record.known = {**record.known, **pair}
        return record
