"""Rules of ops along rows: norms, reductions, orders, rotary embedding."""

from __future__ import annotations

from typing import Any

from heliograph_server.gateways.ggml_rpc.building import Value
from heliograph_server.gateways.ggml_rpc.ops.rule import Call, Rule, plain

#: Modes of rotary embedding with four positions for each token.
SECTIONED = (8, 24, 40)
#: Stands for 0, of which YaRN takes the logarithm: beyond all dimensions.
LEAST_BETA = 1e-30


def rope(op: str) -> Rule:
    def make(call: Call) -> Value:
        mode, tokens = call.integer(2), call.shape(0)[-3]
        is_sectioned = mode in SECTIONED
        positions = call.builder.reshape(call[1], (4, tokens) if is_sectioned else (tokens,))
        factors = call.optional(2)
        return call.node(
            op, call[0], positions, None if factors is None else call.builder.flat(factors),
            n_dims=call.integer(1), mode=mode,
            sections=call.tensor.op_params[11:15] if is_sectioned else (),
            freq_base=call.real(5), freq_scale=call.real(6), attn_factor=call.real(8),
            offset=call.integer(15), **_yarn(call),
        )  # fmt: skip

    return Rule(make, 2, frozenset((0, 1, 2)))


def _yarn(call: Call) -> dict[str, Any]:
    """Return the parameters of YaRN; without it, ggml's may have any values."""
    context, factor = call.integer(4), call.real(7)
    if not factor:
        return {}
    betas = call.real(9), call.real(10)
    if not context:
        # The logarithm of 0 is below that of all dimensions, as that of 1 is at these.
        context, betas = 1, (1.0, 1.0)
    fast, slow = (one or LEAST_BETA for one in betas)
    return {"ext_factor": factor, "n_ctx_orig": context, "beta_fast": fast, "beta_slow": slow}


def _soft_max(call: Call) -> Value:
    mask, sinks = call.optional(1), call.optional(2)
    if mask is not None:
        mask = fitted_mask(call, mask, call.shape(0))
    if sinks is not None:
        if mask is None:
            # Operands are given in order.
            mask = call.node("fill", shape=(1, 1, 1, 1), value=0.0, dtype=call.dtype(0))
        sinks = call.builder.flat(sinks)
    return call.node("soft_max", call[0], mask, sinks, scale=call.real(0), max_bias=call.real(1))


def fitted_mask(call: Call, mask: Value, shape: tuple[int, ...]) -> Value:
    """Return a mask that broadcasts to scores: it may have more rows, and fewer matrices."""
    builder = call.builder
    found = builder.shape(mask)
    rows = (*found[:-2], shape[-2], found[-1])
    cut = builder.slice(mask, (0,) * len(rows), rows)
    whole = (*shape[:-2], shape[-2], found[-1])
    if all(size in (1, want) for size, want in zip(rows, whole, strict=True)):
        return cut
    return call.node("repeat", cut, shape=whole)


def _argsort(call: Call) -> Value:
    return call.node("argsort", call[0], descending=call.integer(0) == 1)


def _top_k(call: Call) -> Value:
    return call.node("top_k", call[0], k=call.want.shape[-1])


RULES: dict[str, Rule] = {
    "sum": plain("sum"),
    "sum_rows": plain("sum_rows"),
    "cumsum": plain("cumsum"),
    "mean": plain("mean"),
    "argmax": plain("argmax"),
    "count_equal": plain("count_equal", 2),
    "norm": plain("norm", eps="f0"),
    "rms_norm": plain("rms_norm", eps="f0"),
    "group_norm": plain("group_norm", groups="i0", eps="f1"),
    "l2_norm": plain("l2_norm", eps="f0"),
    "soft_max": Rule(_soft_max, 1),
    "rope": rope("rope"),
    "rope_back": rope("rope_back"),
    "argsort": Rule(_argsort, 1),
    "top_k": Rule(_top_k, 1),
    "timestep_embedding": plain("timestep_embedding", ranks=(1,), dim="i0", max_period="i1"),
    "dsv4_hc_comb": plain("dsv4_hc_comb", ranks=(2, 1, 1), eps="f0", iterations="i1"),
}
