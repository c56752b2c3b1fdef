"""Matrix products on a GPU: cuBLAS through a plan beside PyTorch's, and stored weights beside a copy's
bandwidth."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from figures import Figure
from gpu_common import Call, copy_seconds_per_byte, gpu, in_turns, planned, torch, type_of

from heliograph_proto.graph import LeafKind

SIDE = 8192
#: At least 0.95 of PyTorch's speed; time goes the other way.
PRODUCT_BAR = 1 / 0.95
#: Rows and columns of weights, and products behind one another in a plan: several GB, which no cache holds,
#: so that a run's own cost is a small part.
STORED = ((8192, 64), (32768, 8))
STORED_BAR = 1 / 0.65
NAMES = {"bf16": "bfloat16", "f16": "float16", "f32": "float32"}


def figures() -> Iterator[Figure]:
    """Milliseconds a product of 8192 cubed."""
    library = torch()
    for name, theirs in NAMES.items():
        library.backends.cuda.matmul.allow_tf32 = True
        a, b = (
            library.randn(SIDE, SIDE, device="cuda", dtype=library.float32).to(getattr(library, theirs))
            for _ in range(2)
        )

        peer = _product(library, a, b)
        leaves = [(LeafKind.INPUT, type_of(name, SIDE, SIDE))] * 2
        with gpu(tf32=1) as device, planned(device, leaves, [("matmul", (0, 1), {})]) as ours:
            medians = [seconds * 1e3 for seconds in in_turns(ours.run, peer)]
        note = f"{2 * SIDE**3 / medians[0] / 1e9:.0f} TFLOP/s; tf32 for f32"
        yield Figure(
            f"gpu-products/{name}", *medians, PRODUCT_BAR, "ms", f"PyTorch {library.__version__}", note
        )


def _product(library: Any, a: Any, b: Any) -> Call:
    """PyTorch's, to the end."""
    out = library.empty_like(a)

    def run() -> None:
        library.matmul(a, b, out=out)
        library.cuda.synchronize()

    return run


def stored() -> Iterator[Figure]:
    """Milliseconds a product of one row with quantized weights, beside a copy of their bytes: those of a
    chain by the number of its products, each of which has weights of its own."""
    for name in ("q4_0", "q4_k", "q8_0"):
        for side, count in STORED:
            weights = type_of(name, side, side)
            leaves = [*[(LeafKind.WEIGHT, weights)] * count, (LeafKind.INPUT, type_of("f32", 1, side))]
            nodes = [("mul_mat", (number, count + number), {}) for number in range(count)]
            with gpu() as device, planned(device, leaves, nodes) as ours:
                each = copy_seconds_per_byte(device)
                seconds = in_turns(ours.run, lambda: None)[0] / count
            limit = weights.nbytes * each
            note = (
                f"{weights.nbytes / seconds / 1e9:.0f} GB/s of weights; the copy: {1 / each / 1e9:.0f} GB/s; "
                f"{count} products in a plan"
            )
            yield Figure(
                f"gpu-stored/{name}-{side}",
                seconds * 1e3,
                limit * 1e3,
                STORED_BAR,
                "ms",
                "a copy's bandwidth",
                note,
            )
