"""Attention as launches. Pure."""

from __future__ import annotations

from collections.abc import Sequence

from heliograph_backends.cuda.chains import FLOATS
from heliograph_backends.cuda.filling import Filling, Launch, Located
from heliograph_backends.cuda.parameters import ATTENTION, TYPES
from heliograph_backends.cuda.products import MOST_FEW, MOST_GRID
from heliograph_backends.cuda.rows import slope_power
from heliograph_proto.graph import Node
from heliograph_proto.types import TensorType

#: Widths of heads with a kernel on the matrix units, and its shared memory.
HEADS = (32, 64, 80, 96, 128, 256)
BLOCK_ROWS, BLOCK_KEYS, MOST_WIDTH = 64, 32, 256


def is_attention(node: Node, operands: Sequence[TensorType]) -> bool:
    """Whether a kernel attends with these operands."""
    if node.op != "flash_attn_ext" or any(one.dtype.name not in FLOATS for one in (*operands, node.type)):
        return False
    q, _, v = operands[:3]
    return (
        max(q.shape[-1], v.shape[-1]) <= MOST_WIDTH and max(q.shape[:2]) <= MOST_GRID and node.type.size > 0
    )


def attention(node: Node, values: Sequence[Located], result: Located, shared_bytes: int) -> Launch:
    """On the matrix units where there are rows enough, heads of a usual width, and the block's shared
    memory."""
    q, k, v, *rest = values
    batch, heads, rows, d = q.type.shape
    keys, dv = k.type.shape[-2], v.type.shape[-1]
    filling = Filling(ATTENTION)
    for name, one in zip(("q", "k", "v", "mask", "sinks"), values, strict=False):
        filling.address(name, one)
        filling.set(**{f"{name}_type": TYPES[one.type.dtype.name]})
    filling.address("result", result)
    # The result is [batch, rows, heads, dv].
    b, r, h = result.strides[:3]
    filling.set(
        heads=heads, rows=rows, keys=keys, d=d, dv=dv, q_strides=q.strides[:3], k_strides=k.strides[:3],
        v_strides=v.strides[:3], result_strides=(b, h, r), result_type=TYPES[result.type.dtype.name],
        batch_repeat=batch // max(1, k.type.shape[0]), head_repeat=heads // max(1, k.type.shape[1]),
        mask_batches=1, mask_heads=1, has_mask=bool(rest), has_sinks=len(rest) > 1,
        scale=node.attributes["scale"], cap=node.attributes["logit_softcap"],
        max_bias=node.attributes["max_bias"], slope_power=slope_power(heads),
    )  # fmt: skip
    if rest:
        _mask(filling, rest[0])
    needed = tiles_bytes(d)
    if rows > MOST_FEW and d == dv and d in HEADS and needed <= shared_bytes:
        return filling.launch(f"attention_{d}", (-(-rows // BLOCK_ROWS), heads, batch), 128, needed)
    return filling.launch("attention_few", (rows, heads, batch), 128)


def tiles_bytes(d: int) -> int:
    """Shared memory of the kernel on the matrix units: queries, keys, values and weights, in words of 4
    bytes."""
    pitch = BLOCK_ROWS * (d + 4) + BLOCK_KEYS * (d + 4) + BLOCK_KEYS * (d + 8) + BLOCK_ROWS * (BLOCK_KEYS + 4)
    return 4 * pitch


def _mask(filling: Filling, mask: Located) -> None:
    """Its leading dimensions, which come again."""
    missing = 4 - mask.type.ndim
    shape = (1,) * missing + mask.type.shape
    strides = (0,) * missing + mask.strides
    filling.set(mask_batches=shape[0], mask_heads=shape[1], mask_strides=strides[:3])
