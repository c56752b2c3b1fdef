"""Inputs of a running loop that its client feeds: their tensors, and the writes between two steps."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence

from heliograph_backends.contract import Tensor, access
from heliograph_proto import commands as c
from heliograph_proto.plans import Port
from heliograph_server.plans.loaded_plan import PlanCopy


class FedInputs:
    """The inputs of a loop that may be fed. Each has a tensor of its own, which feeds write.

    A carried input has the step's own tensor only in a step with a feed; otherwise the step reads
    the output of the one before in place.
    """

    def __init__(self, copy: PlanCopy, loop: c.Loop, ports: Sequence[Port]) -> None:
        self._own = {place: copy.fed_for(place, ports[place].type) for place in loop.fed_inputs}
        self._lasting = set(loop.fed_inputs) - {one.input for one in loop.carries}

    def lasting(self, inputs: Sequence[Tensor]) -> Sequence[Tensor]:
        """Return the inputs of a loop, with copies of those that keep what is fed."""
        found = list(inputs)
        for place in self._lasting:
            access.copy(inputs[place], self._own[place])
            found[place] = self._own[place]
        return found

    def apply(self, feeds: Iterable[c.FeedLoop], inputs: Sequence[Tensor]) -> Sequence[Tensor]:
        """Write feeds, and return the inputs of the next step."""
        found = list(inputs)
        for feed in feeds:
            for place, data in feed.values:
                own = self._own[place]
                if not feed.rows:
                    access.write(own, 0, memoryview(data))
                else:
                    if found[place] is not own:
                        access.copy(found[place], own)
                    _write_rows(own, memoryview(data), feed.rows)
                found[place] = own
        return found


def _write_rows(tensor: Tensor, data: memoryview, rows: Sequence[int]) -> None:
    size = data.nbytes // len(rows)
    for first, count, row in _together(rows):
        access.write(tensor, row * size, data[first * size : (first + count) * size])


def _together(rows: Sequence[int]) -> Iterator[tuple[int, int, int]]:
    """Yield the place, the number and the first row of rows that lie side by side."""
    first = 0
    for place in range(1, len(rows) + 1):
        if place == len(rows) or rows[place] != rows[place - 1] + 1:
            yield first, place - first, rows[first]
            first = place
