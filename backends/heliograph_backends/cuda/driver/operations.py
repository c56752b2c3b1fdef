"""The instructions of elementwise chains, by number; the kernels' source has them as OP_NAME."""

from __future__ import annotations

from enum import IntEnum


class CudaOperation(IntEnum):
    """x and y are the operands of an instruction, p and q its numbers. Each instruction computes in
    f32, op by op."""

    COPY = 0
    ADD = 1
    SUB = 2
    MUL = 3
    DIV = 4
    MAXIMUM = 5
    MINIMUM = 6
    NEG = 7
    ABS = 8
    SGN = 9
    SQR = 10
    SQRT = 11
    RSQRT = 12
    EXP = 13
    EXPM1 = 14
    LOG = 15
    LOG1P = 16
    SIN = 17
    COS = 18
    TANH = 19
    ERF = 20
    SIGMOID = 21
    RELU = 22
    ELU = 23
    SILU = 24
    GELU = 25
    GELU_ERF = 26
    GELU_QUICK = 27
    SOFTPLUS = 28
    HARDSWISH = 29
    HARDSIGMOID = 30
    STEP = 31
    FLOOR = 32
    CEIL = 33
    ROUND = 34
    TRUNC = 35
    #: x * p + q
    SCALE = 36
    #: between p and q
    CLAMP = 37
    #: x, or x * p below 0
    LEAKY_RELU = 38
    LOG2 = 39
    LOG10 = 40
    #: 0 where y <= 0, else x
    RELU_BACK = 41


#: Operations that are exact in narrow types: a narrow operand gives a result that needs no
#: rounding.
EXACT = frozenset(
    CudaOperation[name]
    for name in (
        "COPY", "MAXIMUM", "MINIMUM", "NEG", "ABS", "SGN", "RELU", "RELU_BACK", "STEP", "FLOOR", "CEIL",
        "ROUND", "TRUNC",
    )
)  # fmt: skip
