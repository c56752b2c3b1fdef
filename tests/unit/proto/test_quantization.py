"""Rows of blocks: bit for bit those of ggml's reference, whose bytes and values stand here as literals
(written once by the package gguf 0.19, and by ggml 0.26 for floats to large blocks)."""

from __future__ import annotations

import hashlib

import numpy as np
import pytest

from heliograph_proto.errors import InvalidArgumentError
from heliograph_proto.quantization import blocks
from heliograph_proto.quantization.blocks import dequantize, quantize
from heliograph_proto.types import DTYPES

SEED = 20250314
QUANTIZED = [name for name, row in DTYPES.items() if row.kind == "quantized"]

#: Two blocks: steps of a quarter around 0, which hit the middles of quanta; and both signs, with a zero.
ROW = np.concatenate([np.arange(-16, 16) / 4 + 0.125, np.where(np.arange(32) % 3, 1, -1) * np.arange(32) / 8])
BLOCKS = {
    "q4_0": "c037809191a2a2b3b3c4c4d5d5e6e6f7f7f8c0b74848d73937d72a26e62a15f51b15f40c",
    "q4_1": "2238c0c380809191a2a2b3b3c4c4d5d5e6e6f7f7113880c3b7c838c7c829d6d919e5ea1ae4fb0bf4",
    "q5_0": "c0330000ffff102132435465768798a9bacbdcedfeffc0b349922449807f9f626ebd534ccc353bea2619f908",
    "q5_1": "0034c0c30000ffff00112233445566778899aabbccddeeff"
    "df3380c3b66ddbb67f80609e9152acb333cbc425d9e606f8",
    "iq4_nl": "22288091a1a1b2b2c3c3d3d4e4e5e6f6f7f816a83838d72927e62a26e51b15f41c14f40c",
    "mxfp4": "7e0f1f2f3f4f5f5e6e6e6d7d7c7b7a79707e6060e16962f27b73f47c74f57d75f57e",
    "q8_0": "d0278189919aa2aab2bac3cbd3dbe3ecf4fc040c141d252d353d464e565e666f777f"
    "d027000408f41014e71d21db292dcf3539c34246b64e52aa5a5e9e666b917377857f",
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
}  # fmt: skip


@pytest.mark.parametrize("name", BLOCKS)
def test_floats_become_the_bytes_of_ggmls_reference(name: str) -> None:
    assert quantize(ROW.astype(np.float32), name).tobytes().hex() == BLOCKS[name]


@pytest.mark.parametrize("name", QUANTIZED)
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


@pytest.mark.parametrize("name", BLOCKS)
def test_a_round_trip_is_as_near_as_the_quanta_are(name: str) -> None:
    print(f"seed {SEED}")
    x = np.random.default_rng(SEED).standard_normal((5, 3, 96)).astype(np.float32)
    back = dequantize(quantize(x, name), name)
    assert back.shape == x.shape
    spread = np.ptp(x.reshape(5, 3, 3, 32), -1)[..., None]
    quanta = {"q8_0": 254, "q5_0": 31, "q5_1": 31, "mxfp4": 7}.get(name, 15)
    # The blocks that are centred on 0 may use but half of their quanta, and scales are rounded to f16.
    step = 2 * spread / quanta
    assert (np.abs(back - x).reshape(5, 3, 3, 32) <= step * 1.01).all()
    again = quantize(back, name)
    np.testing.assert_allclose(dequantize(again, name), back, atol=float(step.max()) / 8)


def test_every_width_of_floats_is_quantized() -> None:
    ml_dtypes = pytest.importorskip("ml_dtypes")
    for width in (np.float16, np.float32, np.float64, ml_dtypes.bfloat16):
        rows = quantize(ROW.astype(width), "q8_0")
        np.testing.assert_array_equal(rows, quantize(ROW.astype(width).astype(np.float32), "q8_0"))


@pytest.mark.parametrize("name", QUANTIZED)
def test_zeros_stay_zeros(name: str) -> None:
    assert not dequantize(quantize(np.zeros((2, 512)), name), name).any()


@pytest.mark.parametrize("name", LARGE)
def test_large_blocks_are_the_bytes_of_ggmls_reference(name: str) -> None:
    found = quantize(LARGE_ROW, name)
    assert hashlib.sha256(found.tobytes()).hexdigest() == LARGE_DIGESTS[name]


@pytest.mark.parametrize("name", LARGE)
def test_a_round_trip_through_large_blocks_is_near(name: str) -> None:
    """The error beside normal numbers, as a share of their square; some parts are zeros, some one number."""
    print(f"seed {SEED}")
    x = np.random.default_rng(SEED).standard_normal((5, 3, 512)).astype(np.float32)
    x[0, 0, :48], x[1, 1, 256:] = 0, 0
    x[2] = np.abs(x[2])
    back = dequantize(quantize(x, name), name)
    assert back.shape == x.shape and not back[1, 1, 256:].any()
    most = {"q2_k": 0.1, "q3_k": 0.03, "q4_k": 0.006, "iq4_xs": 0.006, "q5_k": 0.002, "q6_k": 0.0005}
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
