"""Which data types ggml's CPU takes together, where each by itself is taken."""

from __future__ import annotations

from collections.abc import Sequence

from peers.ggml_call import BLOCKS

#: The types of weights that ggml multiplies with q8_0 rows, besides floats.
BESIDE_Q8_0 = ("q4_0", "q5_0", "q8_0", "iq4_nl", "mxfp4")
#: What is converted to what, besides a type to itself.
CASTS = {
    "f32": f"f16 bf16 i32 {BLOCKS}",
    "f16": f"f32 bf16 {BLOCKS}",
    "bf16": f"f32 f16 {BLOCKS}",
    "i32": "f32",
    **dict.fromkeys(BLOCKS.split(), "f32"),
}


def any_together(operands: Sequence[str], result: str) -> bool:
    return True


def alike(operands: Sequence[str], result: str) -> bool:
    return len(set(operands)) <= 1


def alike_or_f32(operands: Sequence[str], result: str) -> bool:
    """f32 is added to everything else that is added."""
    return operands[1] in (operands[0], "f32") and operands[1] not in BLOCKS.split()


def converted(operands: Sequence[str], result: str) -> bool:
    return operands[0] == result or result in CASTS.get(operands[0], "").split()


def filled(operands: Sequence[str], result: str) -> bool:
    return result in ("f32", "f16")


def multiplied(operands: Sequence[str], result: str) -> bool:
    """Rows of q8_0 beside those weights that are multiplied with them, other blocks never."""
    return operands[1] not in BLOCKS.split() or (operands[1] == "q8_0" and operands[0] in BESIDE_Q8_0)


def set_in(operands: Sequence[str], result: str) -> bool:
    """Rows of i32 are set among such, floats in everything."""
    return operands[1] != "i32" or operands[0] == "i32"


def windowed(operands: Sequence[str], result: str) -> bool:
    """Windows of f16 are taken of f32 and f16, those of f32 of f32 alone."""
    return result == "f16" or (result == "f32" and operands[1] == "f32")
