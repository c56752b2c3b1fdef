"""Rules of loops that client and server share. Pure."""

from __future__ import annotations

from heliograph_proto.description import Port
from heliograph_proto.errors import InvalidArgumentError


def check_until(port: Port) -> None:
    """Whether an output can say that a loop ends. Raises InvalidArgumentError."""
    dtype = port.type.dtype
    if port.type.size != 1 or not (dtype.kind == "bool" or dtype.is_integer):
        raise InvalidArgumentError(
            f"output {port.name!r} is {port.type}; what ends a loop is one bool or integer",
            advice="reduce it in the graph, to a truth value of one element: hg.any(x)",
        )
