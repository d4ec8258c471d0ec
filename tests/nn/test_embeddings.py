"""Stems give one patch per square of an image; spelling and affixes depend on each word by itself."""

from functools import partial

import pytest
import torch
import torch.nn.functional as F

from vlm.nn.embeddings import ConvPoolStem, ConvStem, HashedAffixes, PatchEmbed, Spelling

tiny = partial(ConvPoolStem, stride=1)
STEMS = [PatchEmbed, ConvStem, ConvPoolStem, tiny]


@pytest.mark.parametrize("stem", STEMS)
@pytest.mark.parametrize("patch_size", [4, 8, 16, 32])
def test_a_patch_for_each_square_of_the_image(stem, patch_size):
    images = torch.randn(2, 3, 3 * patch_size, 2 * patch_size)
    assert stem(patch_size=patch_size, dim=12)(images).shape == (2, 12, 3, 2)


@pytest.mark.parametrize("stem", STEMS)
def test_every_parameter_gets_a_gradient_and_every_pixel_counts(stem):
    layer = stem(patch_size=8, dim=12)
    images = torch.randn(4, 3, 16, 16, requires_grad=True)
    out = layer(images)
    (out * torch.randn_like(out)).sum().backward()
    assert all(parameter.grad.abs().sum() > 0 for parameter in layer.parameters())
    assert (images.grad.abs().sum((0, 1)) > 0).all()


@pytest.mark.parametrize("stem", [ConvStem, ConvPoolStem])
@pytest.mark.parametrize("patch_size", [1, 2, 6, 14, 24])
def test_sizes_that_no_halving_gives_are_refused(stem, patch_size):
    with pytest.raises(ValueError, match=f"patch_size {patch_size} is not 4, 8, 16"):
        stem(patch_size=patch_size, dim=12)


def test_two_pixels_a_patch_are_for_tiny_images_alone():
    assert tiny(patch_size=2, dim=12)(torch.randn(2, 3, 6, 4)).shape == (2, 12, 3, 2)
    with pytest.raises(ValueError, match="patch_size 3 is not 2, 4, 8"):
        tiny(patch_size=3, dim=12)
    with pytest.raises(ValueError, match="stride 3 is not 1 or 2"):
        ConvPoolStem(patch_size=8, dim=12, stride=3)


@pytest.mark.parametrize("stem", [ConvPoolStem, tiny])
def test_a_stage_convolves_pools_normalises_and_rectifies_in_plain_layout_too(stem):
    torch.manual_seed(0)
    layer = stem(patch_size=4, dim=12)
    images = torch.randn(4, 3, 16, 16)
    expected = images
    convs, norms = ([m for m in layer if isinstance(m, kind)] for kind in (torch.nn.Conv2d, torch.nn.BatchNorm2d))
    for conv, norm in zip(convs[:-1], norms, strict=True):
        wide = F.conv2d(expected, conv.weight, stride=conv.stride, padding=conv.padding)
        small = F.max_pool2d(wide, 3, stride=2, padding=1)
        expected = F.batch_norm(small, None, None, norm.weight, norm.bias, training=True).relu()
    expected = F.conv2d(expected, convs[-1].weight, convs[-1].bias)
    torch.testing.assert_close(layer(images), expected, atol=1e-4, rtol=1e-4)


ACUTE = " \N{LATIN SMALL LETTER E WITH ACUTE}"
PIECES = [b"", b"", b" the", b" c", b"at", b"s", ACUTE.encode(), b" longerword", b"\xff"]
WORDS = {  # by the ids of their pieces
    (2,): b" the",
    (3, 4): b" cat",
    (3, 4, 5): b" cats",
    (6, 5): f"{ACUTE}s".encode(),
    (7, 5): b" longerwor",  # 10 bytes are read
    (3, 8): b" c\xfe",
}


@pytest.fixture
def spelling():
    torch.manual_seed(0)
    layer = Spelling(vocab_size=len(PIECES), dim=6, width=12, byte_dim=4, kernel=3, longest=10)
    layer.learn(PIECES)
    return layer


def plainly(layer, word):
    """The vector of a word alone, by torch's own convolution."""
    x = layer.byte_embed(torch.tensor([byte + 1 for byte in word])).T[None]  # (1, byte_dim, M)
    kernel = layer.convolution.weight.view(12, 4, 3)
    found = F.conv1d(x, kernel, layer.convolution.bias, padding=1).relu().amax(2)
    return layer.project(found)[0]


@pytest.mark.parametrize("ids", WORDS)
def test_a_word_is_read_as_by_a_convolution_over_it_alone(spelling, ids):
    beside = [1, *ids, 2, 0]  # a special token before, another word and padding after
    rows = torch.tensor([[1, 7, *[0] * len(ids), 0], beside])
    vectors = spelling(rows, torch.arange(len(beside)))[1, 1 : 1 + len(ids)]
    torch.testing.assert_close(vectors, plainly(spelling, WORDS[ids]).expand(len(ids), -1))


def test_special_tokens_have_no_spelling_and_rows_do_not_join(spelling):
    vectors = spelling(torch.tensor([[3, 4], [5, 1]]), torch.arange(2))  # the second row begins inside a word
    torch.testing.assert_close(vectors[1, 0], plainly(spelling, b"s"))
    torch.testing.assert_close(vectors[1, 1], spelling.project.bias)


def test_every_part_learns(spelling):
    spelling(torch.tensor([[1, 2, 3, 4, 5, 6, 7]]), torch.arange(7)).square().sum().backward()
    assert all(parameter.grad.abs().sum() > 0 for parameter in spelling.parameters())


# One to six characters of one to four bytes, some with equal beginnings or endings.
SPELLED = [
    "a",
    "an",
    "ant",
    "want",
    "ants",
    "Antje",
    "é",
    "né",
    "été",
    "Việt\u00a0Nam",
    "Nam",
    "日",
    "日本",
    "本日",
    "日本語",
]
SPELLED += ["한국어", "한국", "국어", "\U0001f642", "\U0001f642a", "б", "абаб", "баба", "аб"]


def code_words(words):
    """Bytes plus 1 of words after a space, as rows that end in zeros."""
    coded = [torch.tensor([byte + 1 for byte in f" {word}".encode()]) for word in words]
    return torch.nn.utils.rnn.pad_sequence([*coded, torch.zeros(24, dtype=torch.long)], batch_first=True)[:-1]


def affixes_of(word, longest):
    pairs = [(word[:length], f" {word}"[-length:]) for length in range(1, longest + 1)]
    return [word, *(affix for pair in pairs for affix in pair)]


@pytest.mark.parametrize("longest", [0, 1, 4])
def test_hashes_are_equal_where_affixes_are(longest):
    layer = HashedAffixes(dim=2, buckets=8, longest=longest)
    found = layer.hash_affixes(code_words(SPELLED)).tolist()
    expected = [affixes_of(word, longest) for word in SPELLED]
    hashes = {(kind, affix): value for row, affixes in zip(found, expected, strict=True) for kind, (value, affix) in
              enumerate(zip(row, affixes, strict=True))}  # fmt: skip
    assert [[hashes[kind, affix] for kind, affix in enumerate(affixes)] for affixes in expected] == found
    assert len(set(hashes.values())) == len(hashes)  # no other two are equal


def test_affixes_add_vectors_of_the_table_and_training_leaves_some_out():
    torch.manual_seed(0)
    layer = HashedAffixes(dim=1, buckets=2**16, longest=2, dropout=0.5, word_dropout=0.5)
    words = code_words(["ant"] * 4000)
    words[-1] = 0  # a special token
    assert not layer(words).any()
    places = layer.hash_affixes(words)[0] % 2**16
    with torch.no_grad():
        layer.table.weight[places, 0] = torch.tensor([1.0, 2, 4, 8, 16])
    sums = layer(words)[:-1, 0].int()
    shares = [(sums // 2**kind % 2).float().mean().item() for kind in range(5)]
    assert shares == pytest.approx([0.25, 0.5, 0.5, 0.5, 0.5], abs=0.03)
    assert layer.eval()(words)[:, 0].tolist() == [31] * 3999 + [0]
