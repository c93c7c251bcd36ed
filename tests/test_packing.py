import re

import pytest
import torch

from nanoqwen import packing
from nanoqwen.packing import LAYOUTS, SEQUENTIAL, VALUE_SHUFFLE, Layout, convert, pack, unpack, words_shape
from nanoqwen.paths import REPO

BIT = {SEQUENTIAL: [0, 4, 8, 12, 16, 20, 24, 28], VALUE_SHUFFLE: [0, 16, 4, 20, 8, 24, 12, 28]}
COLUMNS = (64, 192, 896, 4864, 10944)
TALL = 99
each_layout = pytest.mark.parametrize("layout", LAYOUTS)


def random_values(rows, cols, seed=0):
    return torch.randint(-8, 8, (rows, cols), dtype=torch.int8, generator=torch.Generator().manual_seed(seed))


@pytest.fixture
def tall(monkeypatch):
    """A layout of tiles 16 rows high, in an order drawn at random."""
    order = torch.randperm(16 * 32, generator=torch.Generator().manual_seed(7)).tolist()
    monkeypatch.setitem(LAYOUTS, TALL, Layout(TALL, "Tall", (16, 32), tuple(order), "a test"))
    yield TALL
    packing._order.cache_clear()


# The bits


def test_golden_bytes():
    values = torch.tensor([[0, 1, 2, 3, 4, 5, 6, 7, -8, -7, -6, -5, -4, -3, -2, -1]], dtype=torch.int8)
    assert pack(values, SEQUENTIAL).numpy().astype("<i4").tobytes() == bytes.fromhex("1032547698badcfe")
    assert pack(values, VALUE_SHUFFLE).numpy().astype("<i4").tobytes() == bytes.fromhex("20643175a8ecb9fd")


@pytest.mark.parametrize("layout", BIT)
def test_each_value_lies_at_its_bit(layout):
    values = random_values(5, 64)
    words = pack(values, layout)
    for k, bit in enumerate(BIT[layout]):
        nibble = (words >> bit) & 15
        assert torch.equal(torch.where(nibble > 7, nibble - 16, nibble).to(torch.int8), values[:, k::8])


@each_layout
def test_every_value_in_every_lane_comes_back_alone(layout):
    values = (torch.arange(16 * 64) % 16 - 8).to(torch.int8).view(16, 64)
    for lane in range(8):
        alone = torch.zeros_like(values)
        alone[:, lane::8] = values[:, lane::8]
        for turned in (alone, alone.roll(1, 0), values.t().reshape(16, 64)):
            assert torch.equal(unpack(pack(turned, layout), layout), turned)


@each_layout
def test_all_half_words_come_back(layout):
    halves = torch.arange(65536, dtype=torch.int64)
    for words in (halves, halves << 16, halves | halves.flip(0) << 16):
        words = torch.where(words >= 1 << 31, words - (1 << 32), words).to(torch.int32).view(-1, 8)
        values = unpack(words, layout)
        assert values.min() >= -8 and values.max() <= 7
        assert torch.equal(pack(values, layout), words)


# Matrices


@each_layout
@pytest.mark.parametrize("cols", COLUMNS)
@pytest.mark.parametrize("rows", [1, 7, 33, 129])
def test_a_matrix_comes_back(layout, rows, cols):
    values = random_values(rows, cols)
    words = pack(values, layout)
    assert words.shape == words_shape(rows, cols, layout)
    assert words.shape[0] - rows in range(LAYOUTS[layout].tile[0]) and words.shape[1] == cols // 8
    assert torch.equal(unpack(words, layout, rows), values)


@pytest.mark.parametrize("rows", [4864, 151936, 152064])
def test_the_last_of_many_rows_comes_back(rows):
    values = random_values(rows, 32)
    assert torch.equal(unpack(pack(values)), values)


@each_layout
def test_a_one_hot_vector_picks_its_weight_from_a_ramp(layout):
    values = (torch.arange(3 * 192) % 16 - 8).to(torch.int8).view(3, 192)
    weights = unpack(pack(values, layout), layout, rows=3).float()
    for k in range(192):
        assert torch.equal(weights @ torch.eye(192)[k], values[:, k].float())


def test_conversion_there_and_back_changes_nothing():
    values = random_values(9, 896)
    for source in LAYOUTS:
        for target in LAYOUTS:
            words = convert(pack(values, source), source, target, rows=9)
            assert torch.equal(words, pack(values, target))


def test_a_tile_of_many_rows_is_filled_up_with_zeros(tall):
    values = random_values(33, 96)
    words = pack(values, tall)
    assert words.shape == words_shape(33, 96, tall) == (48, 12)
    assert torch.equal(unpack(words, tall, rows=33), values)
    assert unpack(words, tall)[33:].count_nonzero() == 0
    assert torch.equal(convert(words, tall, VALUE_SHUFFLE, rows=33), pack(values))


def test_a_tile_lies_in_the_order_that_its_layout_gives(tall):
    values = random_values(32, 64)
    words = pack(values, tall)
    tile = words.view(2, 2, 16 * 4)[1, 0]  # the second row of tiles, its first
    nibbles = torch.stack([(tile << 28 - 4 * i) >> 28 for i in range(8)], dim=1).flatten()
    want = values[16:, :32].flatten()[list(LAYOUTS[tall].order)]
    assert torch.equal(nibbles.to(torch.int8), want)


# What is refused


@pytest.mark.parametrize(
    ("values", "error", "words"),
    [
        (torch.zeros(2, 12, dtype=torch.int8), ValueError, "12 columns.*8 at a time"),
        (torch.zeros(16, dtype=torch.int8), ValueError, r"shape \(16,\)"),
        (torch.zeros(0, 8, dtype=torch.int8), ValueError, r"shape \(0, 8\)"),
        (torch.full((2, 8), 8, dtype=torch.int8), ValueError, "8…8; four bits hold −8…7"),
        (torch.full((2, 8), -9, dtype=torch.int8), ValueError, "-9…-9"),
        (torch.zeros(2, 8), TypeError, "torch.float32.*torch.int8"),
    ],
)
def test_pack_refuses_what_is_no_int4_matrix(values, error, words):
    with pytest.raises(error, match=words):
        pack(values)


def test_unpack_refuses_what_are_no_words(tall):
    with pytest.raises(TypeError, match=r"torch.int64.*torch.int32"):
        unpack(torch.zeros(2, 2, dtype=torch.int64))
    with pytest.raises(ValueError, match=r"shape \(4,\)"):
        unpack(torch.zeros(4, dtype=torch.int32))
    with pytest.raises(ValueError, match="20 rows for 20; layout Tall packs 16"):
        unpack(torch.zeros(20, 4, dtype=torch.int32), tall)
    with pytest.raises(ValueError, match="32 rows for 16"):
        unpack(torch.zeros(32, 4, dtype=torch.int32), tall, rows=16)


@pytest.mark.parametrize("call", [lambda x: pack(x, 7), lambda x: convert(pack(x), 1, 7), lambda x: unpack(pack(x), 7)])
def test_an_unknown_layout_is_refused_with_those_there_are(call):
    with pytest.raises(
        ValueError, match=r"layout id is 7; nanoqwen knows 0 \(sequential\), 1 \(ValueShuffle\), 2 \(fragment\)"
    ):
        call(random_values(2, 8))


def test_columns_that_do_not_fill_a_fragment_are_refused():
    with pytest.raises(ValueError, match="96 columns; layout fragment packs 64"):
        pack(random_values(16, 96), packing.FRAGMENT)


def test_a_layout_that_loses_a_value_is_refused():
    with pytest.raises(ValueError, match="must name each value"):
        Layout(9, "Twice", (1, 8), (0, 1, 2, 3, 4, 5, 6, 6), "a test")


# Held together


def test_device_code_sees_the_numbers_of_python():
    assert packing.HEADER.read_text(encoding="utf-8") == packing.device_header()
    numbers = dict(re.findall(r"constexpr int (\w+) = (\d+);", packing.device_header()))
    assert {name: int(value) for name, value in numbers.items()} == {
        "GROUP_SIZE": packing.GROUP_SIZE,
        "ALIGNMENT": packing.ALIGNMENT,
        "PAGE_SIZE": packing.PAGE_SIZE,
        **{f"LAYOUT_{packing._constant(layout.name)}": layout.id for layout in LAYOUTS.values()},
    }


def test_every_layout_has_its_picture_in_the_docs():
    text = (REPO / "docs" / "packfile.md").read_text(encoding="utf-8")
    shown = text.partition("<!-- layouts")[2].partition("```\n")[2].partition("```")[0]
    assert shown == "\n".join(f"{form.id} {form.name}: {form.why}\n{form.picture()}\n" for form in LAYOUTS.values())
