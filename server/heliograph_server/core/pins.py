"""Pins as they come: devices, each with its nodes. What they say of a node is read when a plan is made."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from functools import cached_property
from typing import TypeAlias

from heliograph_proto.errors import InvalidArgumentError

#: Names of devices and the numbers of the nodes that must run there.
Groups: TypeAlias = tuple[tuple[str, tuple[int, ...]], ...]


class PinGroups(Mapping[int, str]):
    """Names of devices by node. Compared as it came, which for a large graph is quicker than node by node.

    The first look at a node raises InvalidArgumentError for one that is pinned to two devices, or that a
    graph of so many `nodes` does not have.
    """

    def __init__(self, groups: Groups, nodes: int) -> None:
        self._groups = groups
        self._nodes = nodes

    def __repr__(self) -> str:
        return f"<PinGroups to {len(self._groups)} devices>"

    def __eq__(self, other: object) -> bool:
        return isinstance(other, PinGroups) and self._groups == other._groups

    def __hash__(self) -> int:
        return hash(self._groups)

    def __getitem__(self, node: int) -> str:
        return self._by_node[node]

    def __iter__(self) -> Iterator[int]:
        return iter(self._by_node)

    def __len__(self) -> int:
        return len(self._by_node)

    @cached_property
    def _by_node(self) -> dict[int, str]:
        pins: dict[int, str] = {}
        for device, nodes in self._groups:
            for node in nodes:
                if pins.setdefault(node, device) != device:
                    raise InvalidArgumentError(f"node {node} is pinned to {pins[node]} and to {device}")
                if node >= self._nodes:
                    raise InvalidArgumentError(f"node {node} is pinned, of {self._nodes}")
        return pins
