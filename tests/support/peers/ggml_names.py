"""Which of our ops have a name of ggml's, and which of ggml's ops we lack."""

from __future__ import annotations

from collections.abc import Mapping

from heliograph_proto.ops.table import OPS
from peers.ggml import library
from peers.ggml_ops import COUNTERPARTS

#: How many ops of each kind ggml 0.26 has; it has no function that says.
COUNTS = {"op": 101, "unary_op": 22, "glu_op": 7}
#: Ops that are compared by another name, or need no comparison.
ELSEWHERE: Mapping[str, str] = {
    "none": "a leaf",
    "dup": "cont",
    "view": "slice",
    "transpose": "permute",
    "reshape": "moves nothing",
    "unary": "each has its own row",
    "glu": "each has its own row",
}


def names() -> set[str]:
    """The names of ggml's ops in lower case."""
    ggml = library()
    return {
        getattr(ggml, f"ggml_{kind}_name")(number).decode().lower()
        for kind, count in COUNTS.items()
        for number in range(count)
    }


def without_counterpart() -> list[str]:
    """Our ops with a name of ggml's that nothing compares."""
    return sorted(name for name in names() & set(OPS) if name not in COUNTERPARTS and name not in ELSEWHERE)


def lacking() -> list[str]:
    """ggml's ops that our op table lacks."""
    return sorted(name for name in names() - set(OPS) if name not in ELSEWHERE)
