"""Groups: nodes that run as one step."""

from __future__ import annotations

from typing import Literal, NamedTuple, TypeAlias

#: The role of a node in a group; "other": a node that is always a step by itself.
Role: TypeAlias = Literal["elementwise", "matmul", "norm", "other"]


class Group(NamedTuple):
    """The numbers of the nodes of one step, in order; the last node's value is the result."""

    role: Role
    nodes: tuple[int, ...]

    @property
    def last(self) -> int:
        """The number of the node whose value is the result."""
        return self.nodes[-1]
