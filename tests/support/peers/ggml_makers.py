"""The way in which ggml makes our ops: the functions of its C API, with our shapes and attributes
turned into C's."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np

from peers.ggml import MAX_DIMENSIONS, Tensor, library, reversed_shape
from peers.ggml_call import BLOCKS, Call, Maker, NotTaken
from peers.ggml_pairs import BESIDE_Q8_0

LARGEST_POSITION = 2**20
SCALE_FLAGS = {"align_corners": 1 << 8, "antialias": 1 << 9}


# Elementwise


def plain(name: str, *attributes: str) -> Maker:
    """The operands, then these attributes."""
    return lambda call: call.node(
        name,
        *(call.leaf(place) for place in range(len(call))),
        *(call[attribute] for attribute in attributes),
    )


def binary(name: str) -> Maker:
    """ggml stretches the second operand alone, and not beside blocks; the first comes here
    stretched."""

    def make(call: Call) -> Tensor:
        if len(call.shape(1)) > len(call.result.shape):
            raise NotTaken("an operand of more dimensions than the result")
        if call.type() in BLOCKS.split() and call.shape(1) != call.shape():
            raise NotTaken("a sum of blocks with something of another shape")
        return call.node(name, call.leaf(0, shape=call.result.shape), call.leaf(1))

    return make


def gated(name: str) -> Maker:
    def make(call: Call) -> Tensor:
        swapped = call["swap"]
        if len(call) == 1:
            return call.node(f"{name}_swapped" if swapped else name, call.leaf())
        a, b = (1, 0) if swapped else (0, 1)
        return call.node(f"{name}_split", call.leaf(a), call.leaf(b))

    return make


def gated_with(name: str, *attributes: str) -> Maker:
    """Those that ggml has for two operands alone: halves are views, made contiguous."""

    def make(call: Call) -> Tensor:
        parts = [call.leaf(place) for place in range(len(call))] if len(call) > 1 else _halves(call)
        return call.node(name, *(parts[::-1] if call["swap"] else parts), *(call[one] for one in attributes))

    return make


def _halves(call: Call) -> list[Tensor]:
    values = np.split(call.operands[0].values, 2, axis=-1)
    return [call.graph.weight(call.type(), half.shape, half) for half in values]


def cast(call: Call) -> Tensor:
    return call.node("cast", call.leaf(), call.result.dtype.name)


def cpy(call: Call) -> Tensor:
    """Into a leaf of the second operand's type, whose elements do not matter."""
    stored = {call.type(), call.result.dtype.name} & set(BLOCKS.split())
    if stored and call.shape()[-1:] != call.result.shape[-1:]:
        raise NotTaken("ggml's CPU quantizes rows of the source, whole blocks or not")
    return call.node("cpy", call.leaf(), call.graph.weight(call.result.dtype.name, call.result.shape))


def arange(call: Call) -> Tensor:
    if not np.float32(call["stop"]) > np.float32(call["start"]):
        raise NotTaken("ggml's ranges rise, in f32")
    return call.node("arange", call["start"], call["stop"], call["step"])


def fill(call: Call) -> Tensor:
    return call.node("fill", call.graph.weight(call.result.dtype.name, call.result.shape), call["value"])


# Rows and reductions


def soft_max(call: Call) -> Tensor:
    shape = call.shape()
    mask = call.optional(1, shape=_mask_shape(call, 1, shape[-2:]))
    if mask is None and call["max_bias"]:
        raise NotTaken("ALiBi needs a mask")
    made = call.node("soft_max_ext", call.leaf(), mask, call["scale"], call["max_bias"])
    if len(call) > 2:
        _add_sinks("soft_max", made, call.leaf(2))
    return made


def _mask_shape(call: Call, place: int, matrix: Sequence[int]) -> Sequence[int] | None:
    """ggml repeats a mask's matrix over heads and batches, but no row and no column of it."""
    if place >= len(call):
        return None
    return (*call.shape(place)[:-2], *matrix)


def _add_sinks(op: str, node: Tensor, sinks: Tensor) -> None:
    getattr(library(), f"ggml_{op}_add_sinks")(node.address, sinks.address)


def flash_attn_ext(call: Call) -> Tensor:
    q, k, v = call.leaf(0, "f32"), call.leaf(1), call.leaf(2)
    mask = call.optional(3, "f16", _mask_shape(call, 3, (call.shape(0)[-2], call.shape(1)[-2])))
    if mask is None and call["max_bias"]:
        raise NotTaken("ALiBi needs a mask")
    made = call.node(
        "flash_attn_ext", q, k, v, mask, *(call[n] for n in ("scale", "max_bias", "logit_softcap"))
    )
    if len(call) > 4:
        _add_sinks("flash_attn_ext", made, call.leaf(4, "f32"))
    return made


def group_norm(call: Call) -> Tensor:
    return call.node("group_norm", call.leaf(), call["groups"], call["eps"])


def argmax(call: Call) -> Tensor:
    """ggml takes matrices, and gives a vector."""
    shape = call.shape()
    matrix = call.graph.weight("f32", (math.prod(shape[:-1]), shape[-1]), call.operands[0].raw)
    like = call.graph.weight("i32", call.result.shape)
    return call.node("reshape", call.node("argmax", matrix), like)


def count_equal(call: Call) -> Tensor:
    """As matrices: of tensors of more dimensions ggml's CPU compares other rows than it should."""
    shape = call.shape() or (1,)
    sizes = (math.prod(shape[:-1]), shape[-1])
    return call.node("count_equal", *(call.graph.weight("i32", sizes, one.raw) for one in call.operands))


def argsort(call: Call) -> Tensor:
    return call.node("argsort", call.leaf(), int(call["descending"]))


# Products


def _activations(call: Call) -> Tensor:
    """Those of a type that ggml does not take beside these weights are the same in f32."""
    dot = {"f16": "f16", "bf16": "bf16", **dict.fromkeys(BESIDE_Q8_0, "q8_0")}
    return call.leaf(1, "" if call.type(1) == dot.get(call.type()) else "f32")


def mul_mat(call: Call) -> Tensor:
    return call.node("mul_mat", call.leaf(0), _activations(call))


def mul_mat_id(call: Call) -> Tensor:
    return call.node("mul_mat_id", call.leaf(0), _activations(call), call.leaf(2, "i32"))


# Rows by index


def get_rows(call: Call) -> Tensor:
    indices = call.shape(1)
    if len(indices) > 3:
        raise NotTaken("indices of four dimensions")
    return call.node("get_rows", call.leaf(0), call.leaf(1, "i32"))


def set_rows(call: Call) -> Tensor:
    """ggml's indices have a dimension fewer than rows; missing ones are in front in both."""
    if len(call.shape(2)) > 3:
        raise NotTaken("indices of four dimensions")
    return call.node("set_rows", call.leaf(0), call.leaf(1), call.leaf(2))


def add_id(call: Call) -> Tensor:
    if len(call.shape()) > 3:
        raise NotTaken("ids of three dimensions")
    return call.node("add_id", call.leaf(0), call.leaf(1), call.leaf(2, "i32"))


def block(name: str) -> Maker:
    def make(call: Call) -> Tensor:
        whole, part = call.leaf(0), call.leaf(1)
        start = reversed_shape(call["start"])[: len(call["start"])]
        offset = sum(at * stride for at, stride in zip(start, whole.nb, strict=False))
        first, *steps = [*reversed(call["step"])] or [1]
        if first != 1:
            raise NotTaken("elements of a row that are not side by side")
        steps += [1] * (MAX_DIMENSIONS - 1 - len(steps))
        strides = [step * stride for step, stride in zip(steps, whole.nb[1:], strict=True)]
        return call.node(name, whole, part, *strides, offset)

    return make


def repeat(call: Call) -> Tensor:
    shape = call.graph.weight(call.type(), call.result.shape)
    return call.node("repeat", call.leaf(), shape)


# Moves


def concat(call: Call) -> Tensor:
    axis, rank = call["axis"], len(call.shape())
    dimension = rank - 1 - axis % rank
    found = call.leaf(0)
    for place in range(1, len(call)):
        found = call.node("concat", found, call.leaf(place), dimension)
    return found


def permute(call: Call) -> Tensor:
    """Ours says where each dimension of the result comes from, ggml's where each of the operand
    goes."""
    rank = len(call.shape())
    goes = list(range(MAX_DIMENSIONS))
    for to, source in enumerate(call["axes"]):
        goes[rank - 1 - source % rank] = rank - 1 - to
    return call.node("cont", call.node("permute", call.leaf(), *goes))


def _by_dimension(call: Call, name: str) -> list[int]:
    """An attribute of one number for each dimension in C's order, 0 for those that ours does not
    have."""
    values = list(reversed(call[name]))
    return values + [0] * (MAX_DIMENSIONS - len(values))


def pad(call: Call) -> Tensor:
    pairs = zip(_by_dimension(call, "left"), _by_dimension(call, "right"), strict=True)
    name = "pad_ext_circular" if call["circular"] else "pad_ext"
    if call["circular"] and any(
        max(left, right) > size
        for left, right, size in zip(call["left"], call["right"], call.shape(), strict=True)
    ):
        raise NotTaken("ggml wraps around once")
    return call.node(name, call.leaf(), *(size for pair in pairs for size in pair))


def roll(call: Call) -> Tensor:
    shifts = _by_dimension(call, "shifts")
    if any(
        abs(shift) >= size for shift, size in zip(shifts, reversed_shape(call.shape()), strict=True) if shift
    ):
        raise NotTaken("ggml's shifts are shorter than the dimension")
    return call.node("roll", call.leaf(), *shifts)


# Rotary embedding


def rope(call: Call) -> Tensor:
    return _rope(call, "")


def rope_back(call: Call) -> Tensor:
    return _rope(call, "_back")


def _rope(call: Call, suffix: str) -> Tensor:
    x, positions, factors = call.leaf(0), call.operands[1], call.optional(2)
    if np.abs(positions.values.astype(np.int64)).max() > LARGEST_POSITION:
        raise NotTaken("ggml's angles are f32, in which the position is not exact")
    if call["offset"] % 2:
        raise NotTaken("ggml's offsets are even")
    flat = call.graph.weight("i32", (positions.values.size,), positions.values.ravel())
    tail = [call[n] for n in ("n_ctx_orig", "freq_base", "freq_scale", "ext_factor", "attn_factor")]
    tail += [call["beta_fast"], call["beta_slow"]]
    if call["sections"]:
        made = call.node(
            f"rope_multi{suffix}", x, flat, factors, call["n_dims"], call["sections"], call["mode"], *tail
        )
    else:
        made = call.node(f"rope_ext{suffix}", x, flat, factors, call["n_dims"], call["mode"], *tail)
    return call.node("rope_set_offset", made, call["offset"]) if call["offset"] else made


# Windows


def steps(call: Call, count: int, names: Sequence[str] = ("stride", "padding", "dilation")) -> list[int]:
    """Each attribute's numbers from the fastest dimension on."""
    defaults = {"stride": 1, "padding": 0, "dilation": 1}
    return [number for name in names for number in reversed(tuple(call[name]) or (defaults[name],) * count)]


def im2col(call: Call) -> Tensor:
    plane = len(call.shape()) == 4
    numbers = steps(call, 2) if plane else [n for one in steps(call, 1) for n in (one, 0)]
    return call.node("im2col", call.leaf(0), call.leaf(1), *numbers, plane, call.result.dtype.name)


def im2col_3d(call: Call) -> Tensor:
    return call.node(
        "im2col_3d", call.leaf(0), call.leaf(1), call["channels"], *steps(call, 3), call.result.dtype.name
    )


def convolution(name: str) -> Maker:
    def make(call: Call) -> Tensor:
        if call.attributes.get("groups", 1) > 1:
            raise NotTaken("ggml's convolutions have one group")
        return call.node(name, call.leaf(0), call.leaf(1), *steps(call, 2))

    return make


def conv_transpose_1d(call: Call) -> Tensor:
    return call.node("conv_transpose_1d", call.leaf(0), call.leaf(1), call["stride"], 0, 1)


def conv_transpose_2d(call: Call) -> Tensor:
    return call.node("conv_transpose_2d_p0", call.leaf(0), call.leaf(1), call["stride"])


def pool_1d(call: Call) -> Tensor:
    (kernel,), (stride, padding) = call["kernel"], steps(call, 1, ("stride", "padding"))
    return call.node("pool_1d", call.leaf(), int(call["average"]), kernel, stride, padding)


def pool_2d(call: Call) -> Tensor:
    kernel, numbers = list(reversed(call["kernel"])), steps(call, 2, ("stride", "padding"))
    return call.node("pool_2d", call.leaf(), int(call["average"]), *kernel, *numbers)


def upscale(call: Call) -> Tensor:
    flags = sum(bit for name, bit in SCALE_FLAGS.items() if call.attributes.get(name))
    return call.node("interpolate", call.leaf(), *reversed_shape(call["shape"]), call["mode"] | flags)
