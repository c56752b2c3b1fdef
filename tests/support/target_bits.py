"""Runs kernels of every family in this process, and prints a digest of each result as JSON.

The environment says for which instruction set they are compiled, see `NUMBA_CPU_NAME`.
"""

from __future__ import annotations

import hashlib
import json
import sys
from collections.abc import Callable

import numpy as np
from backend_graphs import Maker, run
from kernel_runs import normal
from stored_weights import stored, stored_name, times

from heliograph_backends.cpu import CpuDevice
from heliograph_backends.cpu.kernels import Stored
from heliograph_proto.quantization.blocks import quantize

SEED = 7
#: Stored types by how their quanta become float32: as halves, by tables, as digits, by conversion.
CONVERSIONS = (
    Stored.F16, Stored.BF16, Stored.Q8_0, Stored.Q4_0, Stored.Q5_1, Stored.Q3_K, Stored.Q4_K, Stored.Q6_K,
    Stored.IQ4_NL, Stored.IQ4_XS, Stored.MXFP4, Stored.TQ1_0, Stored.TQ2_0, Stored.IQ1_S, Stored.IQ1_M,
    Stored.IQ2_XXS, Stored.IQ2_XS, Stored.IQ2_S, Stored.IQ3_XXS, Stored.IQ3_S, Stored.NVFP4, Stored.Q8_1,
    Stored.Q8_K, Stored.Q1_0, Stored.Q2_0,
)  # fmt: skip

OPS = {
    "elementwise": ("exp", "log", "tanh", "gelu_erf", "silu", "sqrt", "sigmoid"),
    "rows": ("soft_max", "norm", "rms_norm"),
    "searches": ("argsort", "argmax", "cumsum", "cumprod"),
}


def graphs(random: np.random.Generator) -> dict[str, Maker]:
    """Return small graphs, by name."""
    found: dict[str, Maker] = {}

    def add(name: str, build: Callable[..., int]) -> None:
        made = found.setdefault(name, Maker())
        made.output(build(made))

    x = normal(random, 40, 70)
    for name, ops in OPS.items():
        for op in ops:
            add(name, lambda made, op=op: made.node(op, made.input(x)))
    for rows in (1, 7, 50):
        sides = normal(random, rows, 90), normal(random, 90, 70)
        add("products", lambda made, s=sides: made.node("matmul", made.input(s[0]), made.weight(s[1])))
    for kind in CONVERSIONS:
        depth, name = 64 * times(kind), stored_name(kind)
        # Rows in groups, and in their own order.
        for columns in (48, 37):
            weight = stored(kind, (columns, depth), random)
            for rows in (1, 3, 9, 17):
                made = found.setdefault(f"stored {kind.name}", Maker())
                left = made.input(normal(random, rows, depth))
                made.output(made.node("mul_mat", made.weight(weight, name), left))
    for kind in CONVERSIONS[2:]:
        depth, name = 64 * times(kind), stored_name(kind)
        for columns in (48, 37):
            weight, rows = stored(kind, (columns, depth), random), normal(random, 9, depth)
            made = found.setdefault(f"integers {kind.name}", Maker())
            left = made.input(quantize(rows, "q8_0"), "q8_0")
            made.output(made.node("mul_mat", made.weight(weight, name), left))
    # An odd number of rows of an odd number of blocks ends within a vector where it is staged.
    weight, rows = stored(Stored.Q4_0, (37, 96), random), quantize(normal(random, 9, 96), "q8_0")
    add(
        "integers Q4_0",
        lambda made: made.node("mul_mat", made.weight(weight, "q4_0"), made.input(rows, "q8_0")),
    )
    wide, image = normal(random, 3, 3000), normal(random, 1, 20, 9, 11)
    for kept in (5, 600):
        add("searches", lambda made, k=kept: made.node("top_k", made.input(wide), k=k))
    add("searches", lambda made: made.node("argsort", made.input(wide), descending=True))
    for op in OPS["rows"]:
        add("rows", lambda made, op=op: made.node(op, made.input(x.astype(np.float16))))
    for kind in (np.int8, np.uint8):
        sides = tuple(random.integers(0, 256, (2, 70, 8)).astype(np.uint8).view(kind))
        for op in ("add", "sub", "maximum", "minimum", "bitwise_xor", "equal", "less", "less_equal"):
            add("bytes", lambda made, op=op, s=sides: made.node(op, *map(made.input, s)))
    for kind in (np.int16, np.uint16, np.int32, np.uint32, np.int64, np.uint64, np.float32):
        sides = tuple(random.integers(0, 9, (2, 70, 8)).astype(kind))
        for op in ("equal", "less", "less_equal", *(("add", "mul") if sides[0].itemsize == 2 else ())):
            add("bytes", lambda made, op=op, s=sides: made.node(op, *map(made.input, s)))
    truths = tuple(random.random((2, 70, 8)) < 0.5)
    for op in ("logical_and", "logical_or", "logical_xor", "equal"):
        add("bytes", lambda made, op=op: made.node(op, *map(made.input, truths)))
    add("bytes", lambda made: made.node("logical_not", made.input(truths[0])))
    shape, given = (1, 20, 17, 15), normal(random, 1, 20, 4, 5)
    for mode in (0, 1, 2):
        add("images", lambda made, m=mode: made.node("upscale", made.input(image), shape=shape, mode=m))
    for average in (False, True):
        pool = {"kernel": (3, 3), "stride": (2, 2), "average": average}
        sides = given, image
        add("images", lambda made, s=sides, a=pool: made.node("pool_2d_back", *map(made.input, s), **a))
    for kernel in (normal(random, 30, 20, 3, 3), normal(random, 20, 1, 3, 3)):
        op = "conv_2d" if kernel.shape[1] > 1 else "conv_2d_dw"
        for kind in (np.float32, np.float16):
            sides = kernel.astype(kind), image.astype(kind)
            add("windows", lambda made, op=op, s=sides: made.node(op, *map(made.input, s), padding=(1, 1)))
    packed = normal(random, 30, 20, 3, 3)
    add(
        "windows",
        lambda made: made.node("conv_2d", made.weight(packed), made.input(image), padding=(1, 1)),
    )
    return found


def main() -> None:
    device = CpuDevice("target", threads=1, memory_bytes=2**28)
    digests = {}
    for name, made in graphs(np.random.default_rng(SEED)).items():
        found = hashlib.sha256()
        for array in run(device, made):
            found.update(array.tobytes())
        digests[name] = found.hexdigest()
    device.close()
    json.dump(digests, sys.stdout)


if __name__ == "__main__":
    main()
