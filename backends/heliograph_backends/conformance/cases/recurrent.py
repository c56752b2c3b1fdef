"""Cases of state space models, linear attention, solve_tri, and DeepSeek's ops."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from heliograph_backends.conformance.cases.forms import (
    EVERY_BLOCK,
    FLOATS,
    STRIDES,
    TAKEN,
    Cases,
    c,
    laid,
    outside,
    width,
)
from heliograph_backends.conformance.harness.case import CaseOperand, OpCase, t

MIXED = (("f16", "f32"), ("f32", "f16"), ("f16", "f16"), ("bf16", "f32"), ("f64", "f64"))
#: Sequences, tokens of each, heads, width of a head.
TOKENS = ((1, 1, 1, 1), (3, 1, 2, 5), (2, 4, 3, 16), (2, 3, 2, 64), (1, 0, 2, 3), (1, 2, 1, 128))


def ssm_conv(op: str) -> Iterator[OpCase]:
    """Some taps of some channels."""
    yield from laid(c(op, t("f32", 2, 5, 10), t("f32", 5, 4)), STRIDES)
    for n, channels, tokens, taps in ((1, 1, 1, 1), (2, 3, 0, 4), (1, 517, 7, 4), (0, 2, 3, 2)):
        yield c(op, t("f32", n, channels, tokens + taps - 1), t("f32", channels, taps))
    for left, right in MIXED:
        yield c(op, t(left, 2, 5, 10), t(right, 5, 4))


def _scan(
    op: str, name: str, form: tuple[int, ...], ids: str = "i32", fill: str = "", snapshots: int = 1
) -> OpCase:
    states, n, tokens, heads, width, groups, size, decays = form
    shapes = ((states, heads, width, size), (n, tokens, heads, width), (n, tokens, heads), (heads, decays))
    more = ((n, tokens, groups, size),) * 2
    fills = ("normal", "normal", "normal", "below_zero", "normal", "normal")
    operands = [t(name, *shape, fill=own) for shape, own in zip((*shapes, *more), fills, strict=True)]
    index = t(ids, n, fill=fill or f"below {states}")
    return c(op, *operands, index, **({"snapshots": snapshots} if snapshots > 1 else {}))


def ssm_scan(op: str) -> Iterator[OpCase]:
    """Mamba 1 and 2."""
    yield from laid(_scan(op, "f32", (3, 2, 4, 4, 3, 2, 5, 1)), STRIDES)
    yield _scan(op, "f32", (1, 1, 1, 1, 1, 1, 1, 1))
    yield _scan(op, "f32", (2, 2, 3, 8, 1, 1, 16, 16), "i64")
    yield _scan(op, "f32", (2, 2, 5, 4, 64, 2, 128, 1))
    yield _scan(op, "f32", (3, 2, 4, 2, 3, 1, 5, 1), snapshots=3)
    for name in FLOATS[1:]:
        yield _scan(op, name, (2, 2, 3, 4, 3, 2, 5, 1))
    for number in (3, -1):
        yield from outside(_scan(op, "f32", (3, 2, 2, 2, 2, 1, 3, 1), fill=f"outside {number}"))


def _gated(op: str, name: str, form: tuple[int, ...]) -> list[CaseOperand]:
    """Return the op's operands; decays are between 0 and 1."""
    n, tokens, heads, width = form
    x, gate = t(name, n * tokens, heads, width), t(name, n * tokens, heads, width, fill="fraction")
    less = t(name, n * tokens, heads, width, fill="below_zero")
    state = t(name, n, heads * width * width)
    return {
        "rwkv_wkv6": [x, x, x, t(name, heads, width), gate, state],
        "rwkv_wkv7": [x, gate, x, x, less, gate, state],
        "gated_linear_attn": [x, x, x, gate, state],
    }[op]


def linear(op: str) -> Iterator[OpCase]:
    """Sequences of equal length."""
    yield from laid(c(op, *_gated(op, "f32", (2, 3, 2, 4))), STRIDES)
    for form in TOKENS:
        yield c(op, *_gated(op, "f32", form))
    for name in FLOATS[1:]:
        yield c(op, *_gated(op, name, (2, 3, 2, 4)))
    if op == "gated_linear_attn":
        yield c(op, *_gated(op, "f32", (2, 3, 2, 16)), scale=0.25)


def _delta(op: str, name: str, form: tuple[int, ...], snapshots: int = 1) -> OpCase:
    n, tokens, heads, width, own_n, own_heads, gates = form
    keys = t(name, own_n, tokens, own_heads, width, fill="fraction")
    operands = [
        t(name, own_n, tokens, own_heads, width), keys, t(name, n, tokens, heads, width),
        t(name, n, tokens, heads, gates, fill="below_zero"), t(name, n, tokens, heads, 1, fill="fraction"),
        t(name, n, heads, width, width),
    ]  # fmt: skip
    return c(op, *operands, **({"snapshots": snapshots} if snapshots > 1 else {}))


def gated_delta_net(op: str) -> Iterator[OpCase]:
    """One gate for each head or for each element, shared heads, snapshots."""
    yield from laid(_delta(op, "f32", (2, 3, 4, 4, 2, 4, 1)), STRIDES)
    for form in (
        (1, 1, 1, 1, 1, 1, 1),
        (2, 3, 4, 5, 1, 2, 5),
        (4, 2, 6, 3, 2, 3, 1),
        (1, 3, 2, 16, 1, 1, 16),
    ):
        yield _delta(op, "f32", form)
    yield _delta(op, "f32", (2, 4, 2, 3, 2, 2, 1), 3)
    for name in FLOATS[1:]:
        yield _delta(op, name, (2, 3, 4, 4, 2, 2, 1))


def solve_tri(op: str) -> Iterator[OpCase]:
    """Triangles of nearly equal elements: their inverses have two diagonals, so errors do not
    grow."""

    def case(name: str, lead: tuple[int, ...], n: int, k: int) -> OpCase:
        return c(op, t(name, *lead, n, n, fill="near_one"), t(name, *lead, n, k))

    yield from laid(case("f32", (2,), 7, 3), (*STRIDES, *TAKEN))
    for lead, n, k in (((), 1, 1), ((2, 3), 5, 1), ((0,), 3, 2), ((), 4, 0), ((2,), 64, 17)):
        yield case("f32", lead, n, k)
    for name in FLOATS[1:]:
        yield case(name, (2,), 5, 3)


def lightning_indexer(op: str) -> Iterator[OpCase]:
    """Masks for all streams or for each."""

    def case(name: str, mask: str, form: tuple[int, ...], fill: str = "bias", k: str = "") -> OpCase:
        streams, tokens, heads, size, keys, masks = form
        return c(
            op, t(name, streams, tokens, heads, size), t(k or name, streams, keys, 1, size),
            t(name, streams, 1, tokens, heads), t(mask, masks, 1, tokens, keys, fill=fill),
        )  # fmt: skip

    yield from laid(case("f32", "f16", (2, 3, 4, 8, 5, 2)), STRIDES)
    for form in ((1, 1, 1, 1, 1, 1), (4, 3, 2, 5, 7, 2), (1, 9, 64, 128, 33, 1), (2, 2, 0, 3, 4, 2)):
        yield case("f32", "f16", form, "mask")
    for name in FLOATS[1:]:
        yield case(name, "f16" if name != "f64" else name, (2, 3, 4, 8, 5, 1))
    for name in ("f16", *EVERY_BLOCK):
        yield case("f32", "f16", (2, 3, 4, width(name), 5, 1), "mask", name)


def mixed(op: str) -> Iterator[OpCase]:
    """Gates in place of weights, and streams that stay apart."""
    for name in FLOATS:
        streams = t(name, 3, 4, 33)
        if op == "dsv4_hc_pre":
            yield c(op, streams, streams, gated=True, scale=0.25)
            yield c(op, streams, t(name, 3, 4), scale=-1.5)
        if op == "dsv4_hc_post":
            yield c(op, t(name, 3, 33), streams, t(name, 3, 4))


def hyper(op: str) -> Iterator[OpCase]:
    """Four streams, and other numbers of them."""
    options = {"eps": 0.001, "iterations": 20} if op == "dsv4_hc_comb" else {}

    def case(name: str, tokens: int, count: int, size: int) -> OpCase:
        streams = t(name, tokens, count, size)
        mixes = (2 + count) * count
        operands = {
            "dsv4_hc_comb": [t(name, tokens, mixes), t(name, 3), t(name, mixes)],
            "dsv4_hc_pre": [streams, t(name, tokens, count)],
            "dsv4_hc_post": [
                t(name, tokens, size), streams, t(name, tokens, count), t(name, tokens, count, count)
            ],
        }  # fmt: skip
        return c(op, *operands[op], **options)

    yield from laid(case("f32", 3, 4, 7), STRIDES)
    for tokens, count, size in ((1, 1, 1), (5, 4, 517), (0, 4, 3), (2, 3, 9)):
        yield case("f32", tokens, count, size)
    for name in FLOATS[1:]:
        yield case(name, 3, 4, 9)
    yield from mixed(op)


CASES: Mapping[str, Cases] = {
    "ssm_conv": ssm_conv, "ssm_scan": ssm_scan,
    **dict.fromkeys(("rwkv_wkv6", "rwkv_wkv7", "gated_linear_attn"), linear),
    "gated_delta_net": gated_delta_net, "solve_tri": solve_tri, "lightning_indexer": lightning_indexer,
    **dict.fromkeys(("dsv4_hc_comb", "dsv4_hc_pre", "dsv4_hc_post"), hyper),
}  # fmt: skip
