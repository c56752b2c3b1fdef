"""Attention as launches: the choice of kernel, and the distribution of lines and keys over blocks.
Pure.

Keys and values in pages (flash_attn_paged) are taken for those of flash_attn_ext, in a batch whose
tables of pages the kernels read.

A line is a row of q of one head. With many rows, each head has its own blocks. With few rows, the
lines of heads that share keys make one block, and if that gives too few blocks, blocks also share
the keys.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

from heliograph_backends.cuda.driver.parameters import ATTENTION, TYPES
from heliograph_backends.cuda.lowering.chains import FLOATS
from heliograph_backends.cuda.lowering.launch import Filling, Launch, Located, Strides
from heliograph_backends.cuda.lowering.products import MOST_GRID, reads_rows
from heliograph_backends.cuda.lowering.rows import slope_power
from heliograph_backends.cuda.lowering.target import Asked, CudaTarget
from heliograph_proto.graph import Node
from heliograph_proto.types import DTYPES, TensorType

OPS = ("flash_attn_ext", "flash_attn_paged")
#: The row widths of kernels on the matrix units. Narrower rows are padded with zeros.
WIDTHS = {"f16": (32, 64, 96, 128, 256), "bf16": (32, 64, 96, 128, 256), "f32": (32, 64, 128, 256)}
#: Stored block types that the kernels read directly as keys and values.
BLOCKS = ("q8_0", "q4_0")
MOST_WIDTH = 256
#: Up to this many rows of a head, the lines of heads that share keys make one block of this many
#: lines.
FEW_ROWS = FEW_LINES = 16
#: The bytes in flight for each multiprocessor: twice what 4.8 TB/s need at a memory latency of 700
#: ns.
BYTES_ON_THEIR_WAY = 2**16
#: The fewest keys worth a block of their own, and the most parts.
LEAST_KEYS, MOST_SPLITS = 128, 64
#: Only the address of the workspace matters.
WORKSPACE_TYPE = TensorType(DTYPES["u8"], (1,))
#: The limits of elements and bytes that kernels count in 32 bits.
MOST_COUNT, MOST_STRIDE = 2**30, 2**23


class Tiling(NamedTuple):
    """The tile sizes of a kernel, as in `Tiling` of `attention.cuh`."""

    #: The type that it computes with: f16, bf16 or f32.
    form: str
    width: int
    split: bool

    @property
    def row_bytes(self) -> int:
        return self.width * (4 if self.form == "f32" else 2)

    @property
    def keys(self) -> int:
        """The keys of a tile."""
        return 64 if self.row_bytes <= 256 else 32 if self.row_bytes <= 512 else 16

    @property
    def tile_bytes(self) -> int:
        """The bytes of keys and values of a tile."""
        return 2 * self.keys * self.row_bytes

    @property
    def threads(self) -> int:
        return 2 * self.keys if self.split else 128

    @property
    def lines(self) -> int:
        """The lines of a block."""
        if self.split:
            return FEW_LINES
        return 128 if self.form != "f32" and self.width <= 64 else 64

    @property
    def kernel(self) -> str:
        return f"attention_{self.form}_{self.width}" + "_split" * self.split

    def shared_bytes(self, mask_type: str, mask_lines: int) -> int:
        """Return the bytes of two tiles of keys, values and masks, and of queries if registers do
        not hold them."""
        tiles = 2 * 2 * self.keys * (self.row_bytes + 16)
        queries = 0 if self.row_bytes <= 256 else self.lines * (self.row_bytes + 16)
        pitch = 2 * self.keys + 16 if mask_type == "f16" else 4 * self.keys + 32
        return tiles + queries + 2 * mask_lines * pitch


class BlockSharing(NamedTuple):
    """The distribution of lines and keys over blocks."""

    #: The blocks of the lines that share keys.
    blocks: int
    splits: int = 1
    tiles_of_split: int = 0


class Paged(NamedTuple):
    """Keys, values and tables of attention over pages."""

    k: Located
    v: Located
    pages: Located


def types_of(node: Node, operands: Sequence[TensorType]) -> Sequence[TensorType]:
    """Return the types as those of flash_attn_ext's operands."""
    if node.op != "flash_attn_paged":
        return operands
    q, k, v, mask, pages, *sinks = operands
    shape = (q.shape[0], k.shape[1], pages.shape[1] * k.shape[2])
    gathered = [TensorType(each.dtype, (*shape, each.shape[-1])) for each in (k, v)]
    return [q, *gathered, mask, *sinks]


def values_of(node: Node, values: Sequence[Located]) -> tuple[Sequence[Located], Paged | None]:
    """Return the operands as those of flash_attn_ext, and the pages that keys and values lie in."""
    if node.op != "flash_attn_paged":
        return values, None
    q, k, v, mask, pages, *sinks = values
    _, k_type, v_type, *_ = types_of(node, [one.type for one in values])
    of_batch = [
        one._replace(type=type, strides=(0, *one.strides[1:])) for one, type in ((k, k_type), (v, v_type))
    ]
    return [q, *of_batch, mask, *sinks], Paged(k, v, pages)


def is_attention(node: Node, operands: Sequence[TensorType]) -> bool:
    """True if a kernel computes attention with these operands."""
    if node.op not in OPS or node.type.dtype.name not in FLOATS or not node.type.size:
        return False
    if node.op == "flash_attn_paged" and 0 in (*operands[1].shape, *operands[4].shape):
        return False
    q, k, v, *rest = operands = types_of(node, operands)
    if any(one.dtype.name not in FLOATS for one in (q, *rest)):
        return False
    if not {k.dtype.name, v.dtype.name} <= {*FLOATS, *BLOCKS}:
        return False
    fits = max(q.shape[-1], v.shape[-1]) <= MOST_WIDTH and max(q.shape[:2]) <= MOST_GRID
    counted = max(math.prod(q.shape[:3]), k.shape[2]) <= MOST_COUNT
    return fits and counted and (has_tiling(operands) or not {k.dtype.name, v.dtype.name} & set(BLOCKS))


def form_of(k: TensorType, v: TensorType) -> str:
    """Return the type that a kernel computes with: that of keys and values if both have the same
    narrow one, to which queries are rounded, as in ggml; f16 for blocks; else f32."""
    names = {k.dtype.name, v.dtype.name}
    if names <= {"f16", *BLOCKS}:
        return "f16"
    return "bf16" if names == {"bf16"} else "f32"


def has_tiling(operands: Sequence[TensorType]) -> bool:
    """True if rows are whole chunks of 16 bytes in shared memory, and there are keys."""
    q, k, v = operands[:3]
    each = 4 if form_of(k, v) == "f32" else 8
    blocks = {k.dtype.name, v.dtype.name} & set(BLOCKS)
    return q.shape[-1] % each == v.shape[-1] % each == 0 and k.shape[2] > 0 and not (blocks and each == 4)


def tiling_of(operands: Sequence[TensorType]) -> Tiling:
    """Return the kernel for operands that have one on the matrix units."""
    q, k, v = operands[:3]
    form, width = form_of(k, v), max(q.shape[-1], v.shape[-1])
    return Tiling(form, next(one for one in WIDTHS[form] if one >= width), q.shape[2] <= FEW_ROWS)


def sharing_of(tiling: Tiling, q: TensorType, k: TensorType, multiprocessors: int) -> BlockSharing:
    """Return the sharing with enough bytes in flight, as far as there are lines and keys."""
    batch, heads, rows, _ = q.shape
    if not tiling.split:
        return BlockSharing(-(-rows // tiling.lines))
    kv_heads, keys = k.shape[1:3]
    blocks = -(-rows * (heads // kv_heads) // tiling.lines)
    tiles = -(-keys // tiling.keys)
    at_once = max(2, -(-BYTES_ON_THEIR_WAY // tiling.tile_bytes))
    needed = -(-at_once * multiprocessors // (blocks * kv_heads * batch))
    splits = max(1, min(needed, MOST_SPLITS, -(-keys // LEAST_KEYS)))
    each = -(-tiles // splits)
    return BlockSharing(blocks, -(-tiles // each), each)


def workspace_bytes(node: Node, operands: Sequence[TensorType], multiprocessors: int) -> int:
    """Return the bytes of partial results, which are merged at the end; 0 if there are none."""
    if not is_attention(node, operands):
        return 0
    operands = types_of(node, operands)
    if not has_tiling(operands):
        return 0
    q, k, v = operands[:3]
    splits = sharing_of(tiling_of(operands), q, k, multiprocessors).splits
    return 4 * splits * math.prod(q.shape[:3]) * (v.shape[-1] + 2) if splits > 1 else 0


def kernel_of(node: Node, values: Sequence[Located], target: CudaTarget) -> Tiling | None:
    """Return the kernel on the matrix units for operands as of flash_attn_ext; None if rows are not
    whole chunks, or a block's shared memory is too small."""
    types = [one.type for one in values]
    if not has_tiling(types) or any(abs(one.strides[2]) >= MOST_STRIDE for one in values[:3]):
        return None
    if types[0].shape[1] * types[2].shape[3] * 4 >= MOST_STRIDE:  # of the result
        return None
    tiling = tiling_of(types)
    mask_lines = _mask_lines(node, values, tiling)
    shared = tiling.shared_bytes(types[3].dtype.name if mask_lines else "", mask_lines)
    return tiling if shared <= target.shared_bytes else None


def attends(node: Node, values: Sequence[Located], target: CudaTarget) -> bool:
    """True if a kernel reads these operands in place."""
    if not is_attention(node, [one.type for one in values]):
        return False
    values, _ = values_of(node, values)
    types = [one.type for one in values]
    if not reads_rows(values):
        return False
    return kernel_of(node, values, target) is not None or not {one.dtype.name for one in types} & set(BLOCKS)


def takes_biases(node: Node, values: Sequence[Located], target: CudaTarget) -> bool:
    """True if the kernel can add rows to queries, keys and values: they must have the type that it
    computes with."""
    if node.op == "flash_attn_paged" or not attends(node, values, target):
        return False
    tiling = kernel_of(node, values, target)
    return tiling is not None and all(one.type.dtype.name == tiling.form for one in values[:3])


def attention(asked: Asked, biases: Sequence[Located | None] = ()) -> tuple[Launch, ...]:
    """Return the launches of an attention that a kernel supports.

    `biases` are rows that are added to q, k and v, with strides over [batch, heads, rows, d] that
    are 0 except for heads.
    """
    node, target = asked.node, asked.target
    values, paged = values_of(node, asked.values)
    filling = _filled(node, values, asked.result)
    if paged is not None:
        _fill_pages(filling, paged, asked)
    q, k, *_ = values
    batch, heads, rows, _ = q.type.shape
    tiling = kernel_of(node, values, target)
    if tiling is None:
        return (filling.launch("attention_few", (rows, heads, batch), 128),)
    for bit, (name, bias) in enumerate(zip("qkv", biases, strict=False)):
        if bias is not None:
            filling.address(f"{name}_bias", bias)
            filling.set(**{f"{name}_bias_stride": bias.strides[1]})
            filling.parameters["has_biases"][0] |= 1 << bit
    sharing = sharing_of(tiling, q.type, k.type, target.multiprocessors)
    filling.set(splits=sharing.splits, tiles_of_split=sharing.tiles_of_split)
    mask_lines = _mask_lines(node, values, tiling)
    shared = tiling.shared_bytes(values[3].type.dtype.name if mask_lines else "", mask_lines)
    if not tiling.split:
        return (filling.launch(tiling.kernel, (sharing.blocks, heads, batch), 128, shared),)
    if sharing.splits > 1:
        filling.address("partial", Located(WORKSPACE_TYPE, asked.own.workspace, 0, (1,)))
    grid = (sharing.blocks * sharing.splits, k.type.shape[1], batch)
    launch = filling.launch(tiling.kernel, grid, tiling.threads, shared)
    if sharing.splits == 1:
        return (launch,)
    return launch, filling.launch("attention_merge", (batch * heads * rows, 1, 1), 128)


def _filled(node: Node, values: Sequence[Located], result: Located) -> Filling:
    """Fill the parameters of all kernels."""
    q, k, v, *rest = values
    batch, heads, rows, d = q.type.shape
    filling = Filling(ATTENTION)
    for name, one in zip(("q", "k", "v", "mask", "sinks"), values, strict=False):
        filling.address(name, one)
        filling.set(**{f"{name}_type": TYPES[one.type.dtype.name]})
    filling.address("result", result)
    # The result is [batch, rows, heads, dv].
    b, r, h = result.strides[:3]
    filling.set(
        heads=heads, rows=rows, keys=k.type.shape[2], d=d, dv=v.type.shape[3], q_strides=q.strides[:3],
        k_strides=k.strides[:3], v_strides=v.strides[:3], result_strides=(b, h, r),
        result_type=TYPES[result.type.dtype.name], batch_repeat=batch // max(1, k.type.shape[0]),
        head_repeat=heads // max(1, k.type.shape[1]), mask_batches=1, mask_heads=1, has_mask=bool(rest),
        has_sinks=len(rest) > 1, splits=1, scale=node.attributes["scale"],
        cap=node.attributes["logit_softcap"], max_bias=node.attributes["max_bias"],
        slope_power=slope_power(heads),
    )  # fmt: skip
    if rest:
        shape, strides = _four(rest[0])
        filling.set(mask_batches=shape[0], mask_heads=shape[1], mask_strides=strides[:3])
    return filling


def _fill_pages(filling: Filling, paged: Paged, asked: Asked) -> None:
    """Set the places of pages and of their tables."""
    count, _, keys, _ = paged.k.type.shape
    filling.address("pages", paged.pages)
    filling.address("failure", asked.report)
    filling.divisors([keys], "page")
    filling.set(
        table_stride=paged.pages.strides[0], number_stride=paged.pages.strides[1],
        k_page_stride=paged.k.strides[0], v_page_stride=paged.v.strides[0], page_count=count,
        table_pages=paged.pages.type.shape[1], node=asked.number,
    )  # fmt: skip


def _four(mask: Located) -> tuple[tuple[int, ...], Strides]:
    """Return a mask's shape and strides with all leading dimensions."""
    missing = 4 - mask.type.ndim
    return (1,) * missing + mask.type.shape, (0,) * missing + mask.strides


def _mask_lines(node: Node, values: Sequence[Located], tiling: Tiling) -> int:
    """Return the rows of a mask that a block holds: one if all its lines share it, as the kernel
    checks."""
    if len(values) < 4:
        return 0
    shape, strides = _four(values[3])
    _, heads, rows, _ = values[0].type.shape
    one_row = strides[2] == 0 or rows == 1
    shared = heads // max(1, values[1].type.shape[1]) > 1
    one_head = shape[1] == 1 and not node.attributes["max_bias"]
    return 1 if one_row and (not tiling.split or not shared or one_head) else tiling.lines
