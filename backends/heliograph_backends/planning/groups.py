"""Which nodes run as one step."""

from __future__ import annotations

from typing import Literal, NamedTuple, TypeAlias

#: What a node can be in a group; "other": it is always a step by itself.
Role: TypeAlias = Literal["elementwise", "matmul", "norm", "other"]


class Group(NamedTuple):
    """Nodes that run as one step, by number, in order; the last one's value is the result."""

    role: Role
    nodes: tuple[int, ...]

    @property
    def last(self) -> int:
        return self.nodes[-1]
