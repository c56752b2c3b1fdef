"""Attention on a GPU in f16, beside PyTorch's, which takes FlashAttention where it can. There is no bar:
these say where a model's time goes."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from figures import Figure
from gpu_common import Call, copy_seconds_per_byte, gpu, in_turns, planned, torch, type_of

from heliograph_proto.graph import LeafKind

#: Batch, heads, heads of the keys, queries, keys, width: an encoder's sentences, a long prompt, and one query
#: each over long caches.
SHAPES = {
    "encoder": (2048, 12, 12, 128, 128, 32),
    "prompt": (2, 32, 8, 4096, 4096, 128),
    "decoding": (32, 32, 8, 1, 16384, 128),
}
NO_BAR = float("inf")


def figures() -> Iterator[Figure]:
    """Milliseconds of one attention."""
    library = torch()
    for name, (batch, heads, kv, rows, keys, width) in SHAPES.items():
        shapes = (batch, heads, rows, width), (batch, kv, keys, width), (batch, kv, keys, width)
        peer = _attention(library, shapes)
        types = [type_of("f16", *shape) for shape in shapes]
        nodes = [("flash_attn_ext", (0, 1, 2), {"scale": width**-0.5})]
        with gpu() as device, planned(device, [(LeafKind.INPUT, type) for type in types], nodes) as ours:
            each = copy_seconds_per_byte(device)
            medians = [seconds * 1e3 for seconds in in_turns(ours.run, peer)]
        flops = 4 * batch * heads * rows * keys * width
        least = sum(type.nbytes for type in types) * each * 1e3
        note = f"{flops / medians[0] / 1e9:.0f} TFLOP/s; a copy of what is read: {least:.3f} ms"
        yield Figure(f"gpu-attention/{name}", *medians, NO_BAR, "ms", f"PyTorch {library.__version__}", note)


def _attention(library: Any, shapes: tuple[tuple[int, ...], ...]) -> Call:
    """PyTorch's, to the end."""
    q, k, v = (library.randn(shape, device="cuda", dtype=library.float16) for shape in shapes)
    attend = library.nn.functional.scaled_dot_product_attention

    def run() -> None:
        attend(q, k, v, enable_gqa=q.shape[1] != k.shape[1])
        library.cuda.synchronize()

    return run
