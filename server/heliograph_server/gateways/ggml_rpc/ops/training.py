"""Rules of gradients, losses and optimizers."""

from __future__ import annotations

from heliograph_server.gateways.ggml_rpc.building import Value
from heliograph_server.gateways.ggml_rpc.ops.rule import Call, Rule, plain


def _repeat_back(call: Call) -> Value:
    return call.node("repeat_back", call[0], shape=call.want.shape)


def _get_rows_back(call: Call) -> Value:
    places, gradient = call.builder.flat(call[1]), call.of_rank(0, 2)
    count, width = call.builder.shape(places)[0], call.builder.shape(gradient)[1]
    rows = call.builder.slice(gradient, (0, 0), (count, width))
    return call.node("get_rows_back", rows, places, rows=call.want.shape[-2])


def _opt_step_adamw(call: Call) -> Value:
    """The weights, and then the moments, which are written where they were."""
    sources = [call[place] for place in range(4)]
    made = call.node("opt_step_adamw", *sources, call.builder.flat(call[4]))
    shape = call.builder.shape(made)
    start = (call.result, *(0,) * (len(shape) - 1))
    return call.builder.slice(made, start, (1, *shape[1:]))


RULES: dict[str, Rule] = {
    "repeat_back": Rule(_repeat_back, 1, frozenset((0,))),
    "silu_back": plain("silu_back", 2),
    "rms_norm_back": plain("rms_norm_back", 2, eps="f0"),
    "soft_max_back": plain("soft_max_back", 2, scale="f0"),
    "get_rows_back": Rule(_get_rows_back, 2, frozenset((0, 1))),
    "cross_entropy_loss": plain("cross_entropy_loss", 2),
    "cross_entropy_loss_back": plain("cross_entropy_loss_back", ranks=(0, 4, 4)),
    "opt_step_adamw": Rule(_opt_step_adamw, 5, also=(2, 3)),
    "opt_step_sgd": plain("opt_step_sgd", ranks=(4, 4, 1)),
}
