"""Rules of recurrent models' ops, and of DeepSeek's."""

from __future__ import annotations

from heliograph_server.gateways.ggml_rpc.building import Value
from heliograph_server.gateways.ggml_rpc.ops.rule import Call, Rule, plain


def _gated_delta_net(call: Call) -> Value:
    batch, _, heads, width = call.shape(2)
    state = call.builder.reshape(call[5], (batch, heads, width, width))
    return call.node(
        "gated_delta_net", *(call[place] for place in range(5)), state, snapshots=call.integer(0)
    )


def _dsv4_hc_pre(call: Call) -> Value:
    is_gated = call.integer(1) == 1
    return call.node(
        "dsv4_hc_pre", call.of_rank(0, 3), call.of_rank(1, 3 if is_gated else 2),
        scale=call.real(0), gated=is_gated,
    )  # fmt: skip


def _dsv4_hc_post(call: Call) -> Value:
    comb = None if call.optional(3) is None else call.of_rank(3, 3)
    return call.node("dsv4_hc_post", call.of_rank(0, 2), call.of_rank(1, 3), call.of_rank(2, 2), comb)


RULES: dict[str, Rule] = {
    "ssm_scan": plain("ssm_scan", ranks=(4, 4, 3, 2, 4, 4, 1), snapshots="i0"),
    "rwkv_wkv6": plain("rwkv_wkv6", ranks=(3, 3, 3, 2, 3, 2)),
    "rwkv_wkv7": plain("rwkv_wkv7", ranks=(3, 3, 3, 3, 3, 3, 2)),
    "gated_linear_attn": plain("gated_linear_attn", ranks=(3, 3, 3, 3, 2), scale="f0"),
    "gated_delta_net": Rule(_gated_delta_net, 6),
    "dsv4_hc_pre": Rule(_dsv4_hc_pre, 2),
    "dsv4_hc_post": Rule(_dsv4_hc_post, 3),
}
