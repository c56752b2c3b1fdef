"""Rows: state space models and linear attention, whose states run along the tokens, and solve_tri."""

from __future__ import annotations

from heliograph_proto.rules import recurrent
from heliograph_proto.table.row import Attribute, Op

_SNAPSHOTS = Attribute("snapshots", "integer", 1)
_PACKED = " The result, [t + n s, h s], is the tokens' rows, then the states."

ROWS: tuple[Op, ...] = (
    Op(
        "ssm_conv", ("x", "kernel"), "window", recurrent.ssm_conv,
        "The convolution, [n, t, c], of each channel of x [n, c, t + k - 1] with its kernel [c, k], in f32.",
        (), (), 1e-6,
    ),
    Op(
        "ssm_scan", ("states", "x", "dt", "a", "b", "c", "ids"), "attention", recurrent.ssm_scan,
        "Mamba's scan, in f32: for each token of x [n, t, h, d] states [m, h, d, s] become exp(p a) state + "
        "p x b, p = softplus(dt), and y is the sum of state c; a is [h, s] (Mamba 1) or [h, 1] (Mamba 2). "
        "The result is flat: y as x lies, then the states of the last `snapshots` tokens, the newest first, "
        "0 where there are none. ids say which states sequences begin with; one outside is an error of the "
        "run.",
        (_SNAPSHOTS,), (), 1e-6,
    ),
    Op(
        "rwkv_wkv6", ("k", "v", "r", "first", "decay", "state"), "attention", recurrent.rwkv_wkv6,
        "RWKV 6, in f32: of k, v, r [t, h, s] a token's row is r (first kv + state), kv the outer product of "
        "k and v; then the state becomes decay state + kv." + _PACKED,
        (), (), 1e-6,
    ),
    Op(
        "rwkv_wkv7", ("r", "w", "k", "v", "a", "b", "state"), "attention", recurrent.rwkv_wkv7,
        "RWKV 7, in f32: the state, [values, keys], becomes w state + v k^T + (state a) b^T, and a token's "
        "row is state r, of operands [t, h, s]." + _PACKED,
        (), (), 1e-6,
    ),
    Op(
        "gated_linear_attn", ("k", "v", "q", "g", "state"), "attention", recurrent.gated_linear_attn,
        "Gated linear attention, in f32: the state, [keys, values], becomes g state + k v^T, and a token's "
        "row is scale q state, of operands [t, h, s]." + _PACKED,
        (Attribute("scale", "real", 1.0),), (), 1e-6,
    ),
    Op(
        "gated_delta_net", ("q", "k", "v", "g", "beta", "state"), "attention", recurrent.gated_delta_net,
        "The gated delta rule, in f32: states [n, h, values, keys] become S exp(g), then S + beta (v - S k) "
        "k^T, and a token's row is S q / sqrt(s). Heads of q and k repeat over those of v. The result is "
        "[n t + snapshots n s, h s]: rows, then the states of the last tokens, the newest first.",
        (_SNAPSHOTS,), (), 1e-6,
    ),
    Op(
        "solve_tri", ("a", "b"), "matmul", recurrent.solve_tri,
        "x with a x = b, for a [.., n, n], of which the lower triangle counts, and b [.., n, k].",
        (), (1,), 1e-6,
    ),
)  # fmt: skip
