"""Rows of blocks: bit for bit those of ggml's reference, whose bytes and values stand here as
literals (written once by the package gguf 0.19, and by ggml 0.26 for floats to large blocks)."""

from __future__ import annotations

import hashlib

import numpy as np
import pytest

from heliograph_proto.errors import InvalidArgumentError
from heliograph_proto.quantization import blocks, grids
from heliograph_proto.quantization.blocks import dequantize, quantize
from heliograph_proto.types import DTYPES

SEED = 20250314
QUANTIZED = [name for name, row in DTYPES.items() if row.kind == "quantized"]

#: Two blocks: steps of a quarter around 0, which hit the middles of quanta; and both signs, with a
#: zero.
ROW = np.concatenate([np.arange(-16, 16) / 4 + 0.125, np.where(np.arange(32) % 3, 1, -1) * np.arange(32) / 8])
BLOCKS = {
    "q4_0": "c037809191a2a2b3b3c4c4d5d5e6e6f7f7f8c0b74848d73937d72a26e62a15f51b15f40c",
    "q4_1": "2238c0c380809191a2a2b3b3c4c4d5d5e6e6f7f7113880c3b7c838c7c829d6d919e5ea1ae4fb0bf4",
    "q5_0": "c0330000ffff102132435465768798a9bacbdcedfeffc0b349922449807f9f626ebd534ccc353bea2619f908",
    "q5_1": "0034c0c30000ffff00112233445566778899aabbccddeeff"
    "df3380c3b66ddbb67f80609e9152acb333cbc425d9e606f8",
    "iq4_nl": "22288091a1a1b2b2c3c3d3d4e4e5e6f6f7f816a83838d72927e62a26e51b15f41c14f40c",
    "mxfp4": "7e0f1f2f3f4f5f5e6e6e6d7d7c7b7a79707e6060e16962f27b73f47c74f57d75f57e",
    "nvfp4": "32322a32dfdfcfcebeae9e0d506162636474757550e1626ae3747cf5e5657ef6767ef676",
    "q8_1": "d02700008189919aa2aab2bac3cbd3dbe3ecf4fc040c141d252d353d464e565e666f777f"
    "d027304d000408f41014e71d21db292dcf3539c34246b64e52aa5a5e9e666b917377857f",
    "q8_0": "d0278189919aa2aab2bac3cbd3dbe3ecf4fc040c141d252d353d464e565e666f777f"
    "d027000408f41014e71d21db292dcf3539c34246b64e52aa5a5e9e666b917377857f",
}
#: A row of 128 elements, its blocks of one and two bits as ggml 0.25 encodes them; and what ggml
#: makes of a block whose byte i is 37 i mod 251: the values at some places, and the sum of all.
FEW_ROW = np.concatenate([ROW, ROW[::-1]])
FEW_BLOCKS = {
    "q1_0": "e03f0000ffffb76ddbb66ddbb6edffff0000",
    "q2_0": "c043000055555555aaaa555555558aa2288ac043a2288aa255555555aaaa555555550000",
}
FEW_PLACES = [0, 1, 2, 3, 17, 20, 62, 63]
FEW = {
    "q1_0": ([-1, 1, -1, 1, -1, 1, 1, -1], 2.0),
    "q2_0": ([1, 1, -1, 0, 2, -1, 2, 0], 31.0),
}
#: Four blocks of both signs and two sizes, and the digests of ggml's blocks.
_AT = np.arange(1024)
LARGE_ROW = ((_AT * _AT * 7 + _AT * 13) % 257 - 128) / 32 * np.where(_AT // 128 % 3 == 1, 0.125, 1.0)
LARGE_DIGESTS = {
    "q2_k": "0bd5fec925b5b6bc3ebe4af15084abe088653f24c3cf4108e22b6708c05fe47d",
    "q3_k": "a4f197582ef1feb21ea737ed67ee3f5876c052ea7bc8f4079c6e62a98aaba77e",
    "q4_k": "de2adfcb078fe06c4516a988469d42035353f1a7174470be5c80fb248ffc3ffb",
    "q5_k": "d54c6e8dd59487825a1f17ff8873d4a020044f3f92648d3d11690fe00cad063f",
    "q6_k": "5af7dcacc989d6517c01efd86fd0c6b874214b6a64ef5424af7ae1277eca1075",
    "iq4_xs": "afd0d029859af33f4225af809ad96579ef88f9985c2a4edd2b29c9fc102cdf8e",
    "tq1_0": "191153bb6445a7c60f3279c44e21c8a476761783d89bdf50dea6a4c6edea32dd",
    "tq2_0": "2b1aac83487c02faead3a512a213a3010cb41ccad27d1351889ce4b23df770ef",
    "q8_k": "55f849e74f813a4a50e37e1f02b78e1f229e5e28b5fde248aeb3d879a93d6d00",
}
PLACES = [0, 1, 17, 63, 100, 128, 200, 255]
#: Of a block whose byte i is 37 i mod 251: the values at PLACES, and the sum of the squares of all.
LARGE = {
    "q2_k": (
        [-0.0, -0.0, -24461.771484375, -146765.3125, -205475.515625, -190789.765625, -10.62890625,
         -48922.65625], 1540452641422.9302,
    ),
    "q3_k": (
        [-0.06340408325195312, 0.01585102081298828, -0.0, 0.007205009460449219, -0.05403757095336914,
         0.03026103973388672, 0.010807514190673828, 0.0], 0.19226603365677875,
    ),
    "q4_k": (
        [-335876.09375, -335874.125, -335876.5, -134336.40625, -208990.4375, -89563.484375, -126875.8125,
         -261239.90625], 15538114767521.285,
    ),
    "q5_k": (
        [-335878.8125, -335870.625, -335872.96875, -134340.875, -208988.5625, -89557.6875, -126882.375,
         -261237.265625], 15537641684702.8,
    ),
    "q6_k": (
        [-0.0, 31389.1875, -25928.203125, 25331.625, 8627.4375, -53676.734375, 6332.90625, -40796.765625],
        119917015732.92407,
    ),
    "iq4_xs": (
        [5.390625, -6.484375, -2.734375, 6.6796875, 4.78515625, 14.6484375, -19.84375, -27.8125],
        155059.38415527344,
    ),
    "tq1_0": (
        [18.609375, 18.609375, -0.0, -18.609375, -0.0, 18.609375, -18.609375, -18.609375], 59911.428955078125,
    ),
    "tq2_0": (
        [0.0007843971252441406, -0.0, -0.0015687942504882812, -0.0015687942504882812, -0.0007843971252441406,
         0.0007843971252441406, -0.0007843971252441406, -0.0], 0.00022334622258313175,
    ),
    "iq1_s": (
        [0.01220703125, -0.08544921875, -0.08544921875, -0.25634765625, -0.01708984375, 0.02685546875,
         -0.28564453125, 0.01708984375], 4.341983795166016,
    ),
    "iq1_m": (
        [0.0038552284240722656, 0.03469705581665039, 0.019276142120361328, -0.03469705581665039,
         0.014870166778564453, 0.00826120376586914, 0.0016522407531738281, 0.04240751266479492],
         0.22350233239194495,
    ),
    "iq2_xxs": (
        [0.21484375, -0.21484375, 0.21484375, -1.57470703125, 0.52734375, -0.01953125, -0.25390625,
         -1.99462890625], 228.7023663520813,
    ),
    "iq2_xs": (
        [-0.29296875, -0.91552734375, 2.41455078125, 1.64794921875, -0.44921875, 0.01953125, 1.28173828125,
         -0.44921875], 307.96270966529846,
    ),
    "iq2_s": (
        [-0.17578125, -0.17578125, 3.04443359375, 0.10498046875, 1.03759765625, -2.83447265625,
         -0.29296875, -1.77001953125], 359.8559558391571,
    ),
    "iq3_xxs": (
        [-0.29296875, -0.09765625, -1.26953125, -2.24609375, -0.56640625, 0.99609375, 2.24609375,
         1.23046875], 1723.1047630310059,
    ),
    "iq3_s": (
        [0.52734375, 6.85546875, -0.52734375, -3.33984375, 1.46484375, -3.22265625, -0.29296875,
         0.64453125], 2083.477783203125,
    ),
    "q8_k": (
        [-6.756555841837644e+30, -4.4418098589858586e+30, 1.5014568537416987e+30, -2.252185280612548e+30,
         5.192538285856708e+30, 7.194480757512306e+30, 1.126092640306274e+30, 2.815231600765685e+30],
         5.54997983671426e+63,
    ),
}  # fmt: skip
#: Digests of the grids of the package gguf 0.19, their numbers as bytes.
GRIDS = {
    "IQ2_XXS": "05826b5d3e472a3a78f196be62ac78acf81df0f909626e12ab9fa2a5d490dd54",
    "IQ2_XS": "06e47aaca60b4dc1d9b5a3f34540437058a6b142b4d7a59d5ded769b4d1bf1de",
    "IQ2_S": "e1aa1473412b0552c2174c30ef22ab4073f6a181b85a17056e8249bd2932fd88",
    "IQ3_XXS": "46e35f5a997efdee6c99ce57854c8a0d4f0ff8ca57e5e8a60c0793ea580acf5d",
    "IQ3_S": "bd1af4945a1717c65610b0284e4628b9a1ba3b306fae3a06f6e5f597356e349f",
    "IQ1": "07540ffc1aeaf6ad4d97e96b0fcc765aae39671d4ae4a27bbd0e796fde167c6a",
}
#: Types that ggml encodes in other bytes than we do: points of grids.
ENCODED_APART = tuple(name for name in LARGE if name.startswith(("iq1", "iq2", "iq3")))
#: Types that the package gguf does not decode.
NOT_DECODED = ("q8_1", "q8_k", "q1_0", "q2_0")


@pytest.mark.parametrize("name", GRIDS)
def test_grids_are_those_of_ggml(name: str) -> None:
    numbers = getattr(grids, name).numbers
    assert hashlib.sha256(numbers.astype(np.int8).tobytes()).hexdigest() == GRIDS[name]


@pytest.mark.parametrize("name", GRIDS)
def test_grids_are_those_of_the_package_gguf(name: str) -> None:
    gguf = pytest.importorskip("gguf")
    theirs = getattr(gguf.quants, "IQ1_S" if name == "IQ1" else name)
    theirs.init_grid()
    np.testing.assert_array_equal(getattr(grids, name).numbers, theirs.grid.reshape(theirs.grid_shape))


def test_seven_bits_of_signs_become_an_even_number_of_ones() -> None:
    signs = grids.even_signs(np.arange(128, dtype=np.uint8))
    assert (signs & 127).tolist() == list(range(128))
    assert all(int(one).bit_count() % 2 == 0 for one in signs)


@pytest.mark.parametrize("name", BLOCKS)
def test_floats_become_the_bytes_of_ggmls_reference(name: str) -> None:
    assert quantize(ROW.astype(np.float32), name).tobytes().hex() == BLOCKS[name]


@pytest.mark.parametrize("name", [name for name in QUANTIZED if name not in NOT_DECODED])
def test_any_bits_are_the_floats_of_the_package_gguf(name: str) -> None:
    gguf = pytest.importorskip("gguf")
    print(f"seed {SEED}")
    raw = np.random.default_rng(SEED).integers(0, 256, (800, DTYPES[name].block_bytes), np.uint8)
    with np.errstate(all="ignore"):
        theirs = gguf.quants.dequantize(raw, gguf.GGMLQuantizationType[name.upper()])
    ours, are_numbers = dequantize(raw, name), ~np.isnan(theirs)
    np.testing.assert_array_equal(np.isnan(ours), ~are_numbers)
    np.testing.assert_array_equal(ours.view(np.uint32)[are_numbers], theirs.view(np.uint32)[are_numbers])


@pytest.mark.parametrize("name", LARGE)
def test_large_blocks_are_the_floats_of_ggmls_reference(name: str) -> None:
    raw = (np.arange(DTYPES[name].block_bytes) * 37 % 251).astype(np.uint8)
    values, squares = LARGE[name]
    found = dequantize(raw, name)
    np.testing.assert_array_equal(found[PLACES], np.float32(values))
    assert (found.astype(np.float64) ** 2).sum() == pytest.approx(squares, rel=1e-12)


@pytest.mark.parametrize("name", FEW)
def test_blocks_of_few_bits_are_those_of_ggmls_reference(name: str) -> None:
    """The scale of the block of bytes is 0.01953125."""
    assert quantize(FEW_ROW.astype(np.float32), name).tobytes().hex() == FEW_BLOCKS[name]
    values, total = FEW[name]
    found = dequantize((np.arange(18) * 37 % 251).astype(np.uint8), name) / np.float32(0.01953125)
    assert found[FEW_PLACES].tolist() == values and found.sum() == total


def test_elements_of_one_bit_have_the_mean_size_of_their_block() -> None:
    x = np.linspace(-3, 1, 256, dtype=np.float32)
    found = dequantize(quantize(x, "q1_0"), "q1_0")
    np.testing.assert_array_equal(np.signbit(found), np.signbit(x))
    sizes = np.repeat(np.abs(x.reshape(2, 128)).mean(1), 128)
    np.testing.assert_allclose(np.abs(found), sizes, rtol=1e-3)


def test_elements_of_two_bits_are_the_nearest_of_three() -> None:
    """The fourth value, twice the scale, is decoded and never encoded."""
    x = np.linspace(-1, 1, 64, dtype=np.float32)
    assert dequantize(quantize(x, "q2_0"), "q2_0").tolist() == np.sign(np.round(x)).tolist()
    every = np.array([0x00, 0x3C] + [0b11100100] * 16, np.uint8)
    assert dequantize(every, "q2_0").tolist() == [-1, 0, 1, 2] * 16


@pytest.mark.parametrize("name", BLOCKS)
def test_a_round_trip_is_as_near_as_the_quanta_are(name: str) -> None:
    print(f"seed {SEED}")
    x = np.random.default_rng(SEED).standard_normal((5, 3, 192)).astype(np.float32)
    back = dequantize(quantize(x, name), name)
    assert back.shape == x.shape
    spread = np.ptp(x.reshape(5, 3, 6, 32), -1)[..., None]
    quanta = {"q8_0": 254, "q8_1": 254, "q5_0": 31, "q5_1": 31, "mxfp4": 7, "nvfp4": 7}.get(name, 15)
    # The blocks that are centred on 0 may use but half of their quanta, and scales are rounded to
    # f16.
    step = 2 * spread / quanta
    assert (np.abs(back - x).reshape(5, 3, 6, 32) <= step * 1.01).all()
    again = quantize(back, name)
    np.testing.assert_allclose(dequantize(again, name), back, atol=float(step.max()) / 8)


@pytest.mark.parametrize("name", ENCODED_APART)
def test_what_is_decoded_from_points_of_a_grid_is_encoded_as_near(name: str) -> None:
    """Of blocks that are points already a second round trip loses nearly nothing."""
    print(f"seed {SEED}")
    once = dequantize(quantize(np.random.default_rng(SEED).standard_normal((4, 512)), name), name)
    twice = dequantize(quantize(once, name), name)
    assert ((twice - once) ** 2).mean() < 0.03 * (once**2).mean()


@pytest.mark.parametrize("number", [1.0, -3e-3, 1e-7, 200.0])
def test_elements_of_eight_bit_blocks_with_sums_have_the_sums_of_their_quanta(number: float) -> None:
    x = np.linspace(-number, number, 256, dtype=np.float32)
    whole = quantize(x, "q8_k")
    quanta = whole[4:260].view(np.int8).astype(int)
    np.testing.assert_array_equal(whole[260:].view(np.int16), quanta.reshape(16, 16).sum(1))
    small = quantize(x, "q8_1").reshape(8, 36)
    totals = small[:, 4:].view(np.int8).astype(int).sum(1) * np.abs(x.reshape(8, 32)).max(1) / 127
    np.testing.assert_allclose(small[:, 2:4].copy().view(np.float16)[:, 0], totals, rtol=1e-3, atol=1e-7)


def test_elements_beyond_the_largest_scale_of_nvfp4_are_clipped() -> None:
    """A scale is at most 448, and a code at most 6."""
    x = np.full(64, 1e6, np.float32)
    x[16:32] = -5e3
    assert (
        dequantize(quantize(x, "nvfp4"), "nvfp4").tolist() == [2688.0] * 16 + [-2688.0] * 16 + [2688.0] * 32
    )


def test_every_width_of_floats_is_quantized() -> None:
    ml_dtypes = pytest.importorskip("ml_dtypes")
    for width in (np.float16, np.float32, np.float64, ml_dtypes.bfloat16):
        rows = quantize(ROW.astype(width), "q8_0")
        np.testing.assert_array_equal(rows, quantize(ROW.astype(width).astype(np.float32), "q8_0"))


@pytest.mark.parametrize("name", QUANTIZED)
def test_zeros_stay_zeros(name: str) -> None:
    assert not dequantize(quantize(np.zeros((2, 512)), name), name).any()


@pytest.mark.parametrize("name", LARGE_DIGESTS)
def test_large_blocks_are_the_bytes_of_ggmls_reference(name: str) -> None:
    found = quantize(LARGE_ROW, name)
    assert hashlib.sha256(found.tobytes()).hexdigest() == LARGE_DIGESTS[name]


@pytest.mark.parametrize("name", LARGE)
def test_a_round_trip_through_large_blocks_is_near(name: str) -> None:
    """The error beside normal numbers, as a share of their square; some parts are zeros, some one
    number."""
    print(f"seed {SEED}")
    x = np.random.default_rng(SEED).standard_normal((5, 3, 512)).astype(np.float32)
    x[0, 0, :48], x[1, 1, 256:] = 0, 0
    x[2] = np.abs(x[2])
    back = dequantize(quantize(x, name), name)
    assert back.shape == x.shape and not back[1, 1, 256:].any()
    most = {
        "q2_k": 0.1, "q3_k": 0.03, "q4_k": 0.006, "iq4_xs": 0.006, "q5_k": 0.002, "q6_k": 0.0005,
        "q8_k": 1e-4, "iq3_s": 0.02, "iq3_xxs": 0.04, "iq2_s": 0.07, "iq2_xs": 0.1, "iq2_xxs": 0.13,
        "iq1_m": 0.2, "iq1_s": 0.22,
    }  # fmt: skip
    # Three values are far from normal numbers.
    assert ((back - x) ** 2).mean() < most.get(name, 1)


@pytest.mark.parametrize("shape", [(0,), (3, 0), (0, 64), (2, 0, 256)])
def test_nothing_has_no_blocks(shape: tuple[int, ...]) -> None:
    rows = quantize(np.zeros(shape), "q8_0")
    assert rows.size == 0 and dequantize(rows, "q8_0").shape == shape


def test_many_blocks_are_converted_by_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    x = np.random.default_rng(SEED).standard_normal((7, 96))
    whole = quantize(x, "q5_1")
    monkeypatch.setattr(blocks, "TILE_ELEMENTS", 128)
    np.testing.assert_array_equal(quantize(x, "q5_1"), whole)
    np.testing.assert_array_equal(dequantize(whole, "q5_1"), dequantize(bytes(whole), "q5_1").reshape(7, 96))


@pytest.mark.parametrize("name", QUANTIZED)
def test_any_bits_are_blocks(name: str) -> None:
    """What comes from the wire may hold any scale, infinite ones too; nothing warns."""
    print(f"seed {SEED}")
    row = DTYPES[name]
    raw = np.random.default_rng(SEED).integers(0, 256, (500, row.block_bytes), np.uint8)
    assert dequantize(raw, name).shape == (500, row.block_size)
    assert dequantize(np.full((1, row.block_bytes), 255, np.uint8), name).shape == (1, row.block_size)


@pytest.mark.parametrize(
    ("array", "name", "message"),
    [
        (np.zeros(32), "f32", "not a quantized type"),
        (np.zeros(32), "q9_0", "not a quantized type"),
        (np.zeros(33), "q8_0", "whole blocks of 32"),
        (np.zeros(()), "q8_0", "whole blocks of 32"),
        (np.zeros(32, np.int32), "q8_0", "floats needed"),
        (np.full(32, np.nan), "q4_0", "cannot hold"),
        (np.full(32, np.inf), "q8_0", "cannot hold"),
        (np.full(32, 1e30), "q8_0", "cannot hold"),
        (np.full(32, 1e6), "q4_1", "cannot hold"),
        *((np.full(32, value), "mxfp4", "cannot hold") for value in (np.nan, np.inf, -np.inf)),
        *((np.full(64, value), "nvfp4", "cannot hold") for value in (np.nan, np.inf, -np.inf)),
        *((np.full(32, value), "q8_1", "cannot hold") for value in (np.nan, np.inf, 1e30)),
        *((np.full(128, value), name, "cannot hold") for name in FEW for value in (np.nan, np.inf, 1e30)),
        (np.zeros(64), "q1_0", "whole blocks of 128"),
        *((np.full(256, 1e30), name, "cannot hold") for name in ENCODED_APART),
        (np.full(32, 1e30), "iq4_nl", "cannot hold"),
        *((np.full(256, value), name, "cannot hold") for name in LARGE for value in (np.nan, np.inf)),
        (np.full(256, 1e30), "q3_k", "cannot hold"),
        (np.full(256, -1e30), "q4_k", "cannot hold"),
        (np.full(256, 1e30), "q6_k", "cannot hold"),
    ],
)
def test_what_no_blocks_can_hold_is_refused(array: np.ndarray, name: str, message: str) -> None:
    with pytest.raises(InvalidArgumentError, match=message):
        quantize(array, name)


@pytest.mark.parametrize(
    ("rows", "message"),
    [(np.zeros(33, np.uint8), "whole blocks of 34"), (np.zeros(34, np.int8), "uint8"), (np.uint8(1), "uint8"),
     (bytes(33), "whole blocks")],
)  # fmt: skip
def test_what_is_no_blocks_is_refused(rows: np.ndarray | bytes, message: str) -> None:
    with pytest.raises(InvalidArgumentError, match=message):
        dequantize(rows, "q8_0")


# bf16


def test_bits_of_bf16_are_those_of_ml_dtypes() -> None:
    ml_dtypes = pytest.importorskip("ml_dtypes")
    bits = np.arange(2**16, dtype=np.uint16)
    with np.errstate(invalid="ignore"):
        np.testing.assert_array_equal(
            blocks.from_bits(bits), bits.view(ml_dtypes.bfloat16).astype(np.float32)
        )
        print(f"seed {SEED}")
        x = np.random.default_rng(SEED).integers(0, 2**32, 10**5, np.uint32).view(np.float32)
        x = np.concatenate([x[~np.isnan(x)], [0.0, -0.0, np.inf, -np.inf]]).astype(np.float32)
        np.testing.assert_array_equal(blocks.to_bits(x), x.astype(ml_dtypes.bfloat16).view(np.uint16))


def test_halves_round_to_even_and_nan_stays() -> None:
    x = np.array([0x3F808000, 0x3F818000, 0x3F808001, 0x7F7FFFFF, 0x7F800001], np.uint32).view(np.float32)
    assert blocks.to_bits(x).tolist() == [0x3F80, 0x3F82, 0x3F81, 0x7F80, 0x7FC0]


@pytest.mark.parametrize("name", ["float16", "float32", "float64"])
def test_every_shape_and_width_converts(name: str) -> None:
    for shape in ((), (0, 3), (2, 3)):
        found = blocks.to_bits(np.ones(shape, name)[..., ::-1] if shape else np.ones(shape, name))
        assert found.shape == shape and (found == 0x3F80).all()
