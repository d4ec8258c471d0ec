"""Embeddings of raw inputs: images as patches, words by a convolution over their bytes."""

from collections.abc import Sequence
from itertools import pairwise

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from vlm.errors import Count, Injected, Rate
from vlm.nn.dropout import Dropout


class PatchEmbed(nn.Conv2d):
    """Splits the image into patches and projects each linearly (Dosovitskiy et al. 2021, equation 1).

    Args:
        patch_size: Side of a square patch, in pixels.
        dim: Width D of an embedding.
        bias: Whether the projection has a bias.
    Shapes:
        images (B, 3, H, W) -> (B, D, H / patch_size, W / patch_size)
    """

    def __init__(self, *, patch_size: Count, dim: Count, bias: bool = True) -> None:
        super().__init__(3, dim, kernel_size=patch_size, stride=patch_size, bias=bias)


class ConvStem(nn.Sequential):
    """Reduces the image to patches by small convolutions (after Xiao et al. 2021, "Early convolutions").

    From scratch it learns in far fewer steps than one linear projection, because it detects a pattern anywhere in a
    patch. The first convolution has kernel and stride 4, since a stride of 2 would cost more than all later layers
    together; each further one halves the sides and doubles the channels, up to D.

    Args:
        patch_size: Side of a square patch, in pixels; a power of two, at least 4.
        dim: Width D of an embedding.
        min_channels: Minimum number of channels of the first convolution.
    Shapes:
        images (B, 3, H, W) -> (B, D, H / patch_size, W / patch_size)
    Raises:
        ValueError: patch_size is not a power of two, or below 4.
    """

    def __init__(self, *, patch_size: Count, dim: Count, min_channels: Count = 32) -> None:
        stages = _count_stages(patch_size)
        channels = [max(min_channels, dim >> (stages - 1 - stage)) for stage in range(stages)]
        convs = [nn.Conv2d(3, channels[0], kernel_size=4, stride=4)]
        convs += [nn.Conv2d(a, b, kernel_size=3, stride=2, padding=1) for a, b in pairwise(channels)]
        layers: list[nn.Module] = []
        for conv in convs:
            nn.init.kaiming_normal_(conv.weight)
            nn.init.constant_(conv.bias, 0.0)  # type: ignore[arg-type]
            layers += [conv, nn.GroupNorm(1, conv.out_channels), nn.GELU()]
        super().__init__(*layers, nn.Conv2d(channels[-1], dim, kernel_size=1))


class ConvPoolStem(nn.Sequential):
    """Reduces the image to patches by convolutions and pooling (after Hassani et al. 2021, "Compact Transformers").

    Overlapping pools lose less of small images than strides do, so it learns more from thousands of images (rather than
    millions). Pooling comes before normalisation and ReLU, which then process a quarter of the elements, and memory is
    channels-last: together they cut the time of the stem on a CPU to a third.

    Args:
        patch_size: Side of a square patch, in pixels; a power of two, at least 2 * stride.
        dim: Width D of an embedding.
        channels: Channels of the first convolution; each further one doubles them.
        stride: Stride of the first convolution: 2 for photos; 1, which costs more, for tiny images.
    Shapes:
        images (B, 3, H, W) -> (B, D, H / patch_size, W / patch_size)
    Raises:
        ValueError: patch_size is not a power of two, or too small; stride is not 1 or 2.
    """

    def __init__(self, *, patch_size: Count, dim: Count, channels: Count = 32, stride: Count = 2) -> None:
        if stride not in (1, 2):
            raise ValueError(f"stride {stride} is not 1 or 2")
        stages = _count_stages(patch_size, first=2 * stride)
        widths = [3, *(channels << stage for stage in range(stages))]
        layers: list[nn.Module] = []
        for stage, (before, after) in enumerate(pairwise(widths)):
            size, step = (5, 2) if stage == 0 and stride == 2 else (3, 1)
            conv = nn.Conv2d(before, after, size, stride=step, padding=size // 2, bias=False)
            nn.init.kaiming_normal_(conv.weight)
            layers += [conv, nn.MaxPool2d(3, stride=2, padding=1), nn.BatchNorm2d(after), nn.ReLU()]
        super().__init__(*layers, nn.Conv2d(widths[-1], dim, kernel_size=1))

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        return super().forward(images.contiguous(memory_format=torch.channels_last))


def _count_stages(patch_size: int, first: int = 4) -> int:
    """Number of convolutions that reduce the sides by patch_size: the first by 2 or 4, all later ones by 2."""
    stages = patch_size.bit_length() - first.bit_length() + 1
    if stages < 1 or first << (stages - 1) != patch_size:
        sizes = ", ".join(str(first << stage) for stage in range(4))
        raise ValueError(f"patch_size {patch_size} is not {sizes}, ..., as a stem of convolutions needs")
    return stages


SPACE = b" "
INVALID_BYTE = 254  # represents bytes from 254 on, which UTF-8 does not have but a vocabulary may
BYTES = INVALID_BYTE + 2  # number of codes: 0 for no byte, else the byte plus 1
SIZE_STEP = 32  # numbers of words and of bytes are rounded up to multiples of 32 and 8, so that few shapes occur


class Spelling(nn.Module):
    """A vector for each token's word, from the UTF-8 bytes of the entire word (CharWNN: dos Santos and Zadrozny 2014).

    A word begins at a token whose bytes begin with a space, at each special token, and at the begin of a text. A
    convolution over the word's bytes, max pooling and a linear layer give the vector, which all tokens of the word
    share. Even a word that does not occur in training has a known ending and capitals.

    Args:
        vocab_size: Size V of the tokenizer's vocabulary.
        dim: Width D of the vectors.
        width: Number of channels of the convolution.
        byte_dim: Width of the byte embedding.
        kernel: Number of bytes in the receptive field of the convolution.
        longest: Maximum number of bytes of a word; longer words are truncated.
        dropout: Dropout rate of the pooled values.
    Shapes:
        tokens (B, L), positions (L,) or (B, L), 0 where a text begins -> (B, L, D)
    """

    pieces: Tensor
    sizes: Tensor
    begins: Tensor

    def __init__(
        self,
        *,
        vocab_size: Injected[int],
        dim: Count,
        width: Count = 128,
        byte_dim: Count = 32,
        kernel: Count = 5,
        longest: Count = 32,
        dropout: Rate = 0.0,
    ) -> None:
        super().__init__()
        self.longest, self.kernel = longest, kernel
        self.register_buffer("pieces", torch.zeros(vocab_size, longest, dtype=torch.uint8))
        self.register_buffer("sizes", torch.zeros(vocab_size, dtype=torch.long))
        self.register_buffer("begins", torch.ones(vocab_size, dtype=torch.bool))
        self.byte_embed = nn.Embedding(BYTES, byte_dim)
        self.convolution = nn.Linear(kernel * byte_dim, width)  # a matrix, as optimisers such as Muon expect
        self.dropout = Dropout(dropout)
        self.project = nn.Linear(width, dim)
        nn.init.normal_(self.project.weight, std=0.5 * (dim * width) ** -0.5)  # about as large as embeddings of tokens

    @torch.no_grad()
    def learn(self, pieces: Sequence[bytes]) -> None:
        """Stores the bytes of all tokens of the vocabulary; those of special tokens are empty."""
        for id, piece in enumerate(pieces):
            truncated = piece[: self.longest]
            self.pieces[id, : len(truncated)] = torch.tensor(
                [min(byte, INVALID_BYTE) + 1 for byte in truncated], dtype=torch.uint8
            )
            self.sizes[id], self.begins[id] = len(truncated), not piece or piece.startswith(SPACE)

    def forward(self, tokens: Tensor, positions: Tensor) -> Tensor:
        words, owner = self.words(tokens, positions)
        return self.embed_words(words)[owner]  # (B, L, D)

    def embed_words(self, words: Tensor) -> Tensor:
        """The vectors of words, given their bytes as from `words`: (W, M) -> (W, D)."""
        real = (words > 0)[..., None]
        x = F.pad(self.byte_embed(words) * real, (0, 0, self.kernel // 2, (self.kernel - 1) // 2))
        x = x.unfold(1, self.kernel, 1).flatten(2)  # (W, M, byte_dim * kernel)
        x = F.relu(self.convolution(x)) * real
        return self.project(self.dropout(x.amax(1)))

    def words(self, tokens: Tensor, positions: Tensor) -> tuple[Tensor, Tensor]:
        """The bytes of the words, 0 after their end, and the index of each token's word.

        Shapes:
            as in forward -> words (W, M), index (B, L); W is B * L and M is `longest`, on a CPU only as large as needed
        """
        begins = (self.begins[tokens] | (positions == 0)).flatten()
        sizes = self.sizes[tokens].flatten()
        owner = begins.cumsum(0) - 1  # (B * L,)
        before = sizes.cumsum(0) - sizes  # bytes of all tokens before
        start = before - torch.where(begins, before, 0).cummax(0).values  # offset of a token in its word
        at = start[:, None] + torch.arange(self.longest, device=tokens.device)  # (B * L, longest)
        pieces = self.pieces[tokens.flatten()].long()
        none = tokens.numel() * self.longest
        place = torch.where((pieces > 0) & (at < self.longest), owner[:, None] * self.longest + at, none)
        words = tokens.new_zeros(none + 1).scatter(0, place.flatten(), pieces.flatten())
        words = words[:none].view(-1, self.longest)
        if tokens.device.type == "cpu":  # elsewhere the host would wait for these sizes
            used, longest = int(owner[-1]) + 1, int((words > 0).sum(1).max())
            words = words[: used + -used % SIZE_STEP, : max(8, longest + -longest % 8)]
        return words, owner.view(tokens.shape)


PRIME = 2**31 - 1
BASE, FACTOR = 1_000_003, 48_271


class HashedAffixes(nn.Module):
    """The sum of learned vectors of a word, its beginnings and its endings, from one table that hashes share.

    After fastText's n-grams (Bojanowski et al. 2017, section 3.2). Affixes are counted in characters, so they suit
    scripts of any number of bytes; a word that is shorter than an affix counts as the affix. All vectors are 0 at
    first, so one that training does not reach adds nothing.

    Args:
        dim: Width D of the vectors.
        buckets: Number of rows of the table.
        longest: Number of characters of the longest beginning and ending; 0 for only the word.
        dropout: Probability of leaving out a vector in training.
        word_dropout: Probability of leaving out that of the word too, so that its affixes suffice.
    Shapes:
        words (W, M): bytes plus 1, 0 after the end of a word, as from Spelling.words -> (W, D); 0 for words of no bytes
    """

    def __init__(
        self, *, dim: int, buckets: int, longest: int, dropout: float = 0.0, word_dropout: float = 0.0
    ) -> None:
        super().__init__()
        self.longest, self.dropout, self.word_dropout = longest, dropout, word_dropout
        self.table = nn.Embedding(buckets, dim)
        nn.init.zeros_(self.table.weight)

    def forward(self, words: Tensor) -> Tensor:
        places = self.hash_affixes(words) % self.table.num_embeddings
        keep = (words[:, :1] > 0).repeat(1, places.shape[1])
        if self.training:
            keep = keep & (torch.rand(keep.shape, device=keep.device) >= self.dropout)
            keep[:, 0] &= torch.rand(len(keep), device=keep.device) >= self.word_dropout
        return (self.table(places) * keep[..., None]).sum(1)

    def hash_affixes(self, words: Tensor) -> Tensor:
        """Hashes of each word, then of its beginning and its ending of each length: (W, M) -> (W, 1 + 2 * longest)."""
        size = words.shape[1]
        real = words > 0
        number = (real & ((words <= 128) | (words > 192))).cumsum(1)  # of a byte's character; others continue one
        place = torch.arange(size, device=words.device)
        powers = torch.tensor([pow(BASE, exponent, PRIME) for exponent in range(size)], device=words.device)
        from_begin = words * powers % PRIME  # modulo PRIME no product exceeds 64 bits
        from_end = words * powers[(real.sum(1, keepdim=True) - 1 - place).clamp(min=0)] % PRIME
        sums = [from_begin.sum(1)]
        for length in range(1, self.longest + 1):  # a word begins with a space
            sums.append((from_begin * (number <= length + 1)).sum(1))
            sums.append((from_end * (number > number[:, -1:] - length)).sum(1))
        kinds = torch.arange(len(sums), device=words.device)
        return (torch.stack(sums, 1) % PRIME * FACTOR + kinds * BASE) % PRIME
