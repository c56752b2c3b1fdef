"""Rules of ops that move elements and rows."""

from __future__ import annotations

from heliograph_server.gateways.ggml_rpc.buffers import RefusedError
from heliograph_server.gateways.ggml_rpc.building import Value
from heliograph_server.gateways.ggml_rpc.ops.rule import Call, Rule, plain

AXES = 4


def _repeat(call: Call) -> Value:
    return call.node("repeat", call[0], shape=call.want.shape)


def _concat(call: Call) -> Value:
    return call.node("concat", call[0], call[1], axis=AXES - 1 - _axis(call.integer(0)))


def _axis(number: int) -> int:
    if not 0 <= number < AXES:
        raise RefusedError(f"dimension {number} of {AXES}")
    return number


def _get_rows(call: Call) -> Value:
    return call.node("get_rows", call[0], call.builder.reshape(call[1], call.shape(1)[1:]))


def _set_rows(call: Call) -> Value:
    """The sources are the rows, their places, and the tensor that is written."""
    builder = call.builder
    return call.node("set_rows", call[2], call[0], builder.reshape(call[1], call.shape(1)[1:]))


def _block(op: str) -> Rule:
    """A block in a contiguous tensor, whose strides are parameters in bytes."""

    def make(call: Call) -> Value:
        builder, size = call.builder, call.dtype(0).block_bytes
        steps = call.tensor.op_params[:4]
        if any(step < 0 or step % size for step in steps):
            raise RefusedError(f"strides and offset are {steps}; whole elements of {size} bytes are needed")
        strides = (*(step // size for step in steps[2::-1]), 1)
        part, offset = call[1], steps[3] // size
        if op == "acc":
            old = builder.part(call[0], offset, builder.shape(part), strides)
            if old is None:
                raise RefusedError("the block has strides that are not supported")
            part = call.node("add", old, part)
        found = builder.with_part(call[0], builder.cast(part, call.dtype(0)), offset, strides)
        if found is None:
            raise RefusedError("the block has strides that are not supported")
        return found

    return Rule(make, 2)


def _pad(call: Call) -> Value:
    sizes = call.tensor.op_params[:8]
    return call.node("pad", call[0], left=sizes[6::-2], right=sizes[7::-2], circular=bool(call.integer(8)))


def _roll(call: Call) -> Value:
    return call.node("roll", call[0], shifts=call.integers(0, AXES))


RULES: dict[str, Rule] = {
    "repeat": Rule(_repeat, 1, frozenset((0,))),
    "concat": Rule(_concat, 2),
    "get_rows": Rule(_get_rows, 2),
    "set_rows": Rule(_set_rows, 3, updates=True),
    "acc": _block("acc"),
    "set": _block("set"),
    "diag": plain("diag"),
    "diag_mask_inf": plain("diag_mask_inf", n_past="i0"),
    "diag_mask_zero": plain("diag_mask_zero", n_past="i0"),
    "tri": plain("tri", type="i0"),
    "pad": Rule(_pad, 1),
    "pad_reflect_1d": plain("pad_reflect_1d", left="i0", right="i1"),
    "roll": Rule(_roll, 1),
}
