"""The CPU kernels, matrix products."""

from __future__ import annotations

import numpy as np
import pytest
from kernel_runs import (
    multiply,
    nmse,
    normal,
    over,
    pack_weight,
    run,
    same_bits,
)

from heliograph_backends.cpu.kernels import (
    Elementwise,
    Input,
    Instruction,
    PackedOperand,
    ProgramBuilder,
    Register,
)
from heliograph_backends.cpu.kernels import Operation as Op

SHAPES = [
    (1, 1, 1),
    (3, 5, 7),
    (16, 64, 96),
    (13, 33, 100),
    (50, 3000, 70),
    (61, 20, 33),
    (4, 0, 3),
    (200, 70, 400),
]


@pytest.mark.parametrize("packed", [True, False])
@pytest.mark.parametrize("shape", SHAPES)
def test_products_are_close_to_float64(
    shape: tuple[int, int, int], packed: bool, random: np.random.Generator
) -> None:
    rows, depth, columns = shape
    left, right = normal(random, rows, depth), normal(random, depth, columns)
    assert nmse(multiply(left, right, packed), left.astype(np.float64) @ right) <= 2e-12


def test_every_way_to_lay_out_the_sides_gives_the_same_bits(random: np.random.Generator) -> None:
    left, right = normal(random, 45, 83), normal(random, 83, 77)
    expected = multiply(left, right, packed=True)
    wide = np.zeros((83, 3 * 77), np.float32)
    wide[:, ::3] = right
    for other in (
        right,
        np.asfortranarray(right),
        wide[:, ::3],
        np.ascontiguousarray(right[::-1])[::-1],
    ):
        for packed in (True, False):
            assert same_bits(multiply(left, other, packed), expected)
            assert same_bits(multiply(np.asfortranarray(left), other, packed), expected)


def test_a_row_has_the_bits_it_has_alone(random: np.random.Generator) -> None:
    left, right = normal(random, 512, 200), normal(random, 200, 130)
    whole = multiply(left, right, packed=True)
    for row in (0, 11, 12, 47, 48, 300, 511):
        assert same_bits(multiply(left[row : row + 1], right, packed=True)[0], whole[row])


def test_an_element_is_one_chain_of_fused_multiply_adds(random: np.random.Generator) -> None:
    """Rounding exact sums of products in float64 emulates fma, but for rare double roundings."""
    left, right = normal(random, 9, 40), normal(random, 40, 35)
    chain = np.zeros((9, 35), np.float32)
    for k in range(40):
        chain = (chain + np.multiply.outer(left[:, k].astype(np.float64), right[k])).astype(np.float32)
    assert (multiply(left, right, packed=True) == chain).mean() > 0.99


def test_batches_broadcast_by_stride_zero(random: np.random.Generator) -> None:
    left, right = normal(random, 3, 4, 9, 32), normal(random, 3, 9, 4, 32)
    keys = right.transpose(0, 2, 3, 1)
    assert nmse(multiply(left, keys), left.astype(np.float64) @ keys) <= 1e-12
    shared = np.broadcast_to(normal(random, 32, 20), (3, 4, 32, 20))
    assert nmse(multiply(left, shared), left.astype(np.float64) @ shared) <= 1e-12
    assert same_bits(multiply(left, shared), multiply(left, np.ascontiguousarray(shared)))
    assert same_bits(multiply(left, shared[0, 0], packed=True), multiply(left, shared))


@pytest.mark.parametrize("shape", [(5, 30, 16), (130, 50, 400), (1, 700, 90)])
def test_an_epilogue_has_the_bits_of_a_separate_step(
    shape: tuple[int, int, int], random: np.random.Generator
) -> None:
    rows, depth, columns = shape
    left, bias, residual = (
        normal(random, rows, depth),
        normal(random, columns),
        normal(random, rows, columns),
    )
    weight = pack_weight(normal(random, depth, columns))
    results = []
    for fused in (True, False):
        product, extra = (
            np.empty((rows, columns), np.float32),
            np.empty((rows, columns), np.float32),
        )
        arrays = [left, weight, product, bias, residual, extra]
        operands = (over(2, product), over(3, bias), over(4, residual), over(5, extra))
        r = Register(0)
        body = Elementwise(
            operands,
            (
                Instruction(Op.ADD, r, (Input(0), Input(1))),
                Instruction(Op.GELU_ERF, r, (r,)),
                Instruction(Op.ADD, Input(0), (r, Input(2))),
                Instruction(Op.SQUARE, Input(3), (Input(0),)),
            ),
        )
        builder = ProgramBuilder()
        epilogue = body if fused else None
        builder.gemm(
            rows,
            columns,
            depth,
            over(0, left),
            PackedOperand(1),
            over(2, product),
            epilogue=epilogue,
        )
        if not fused:
            builder.elementwise((rows, columns), body)
        run(builder, arrays)
        results += [product, extra]
    assert same_bits(results[0], results[2]) and same_bits(results[1], results[3])
