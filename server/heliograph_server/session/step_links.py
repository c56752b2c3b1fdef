"""Values that a partition's loop exchanges with the other partitions between two steps.

    this step ─ outputs ─▸ others' next step
    others' step ─ inputs, and whether a step follows ─▸ next step here

One partition decides whether a step follows, and tells the others. An input that another host's
step makes has two tensors: it may arrive while the present step still reads the one before. Values
of several steps are asked for ahead, so that they come without another round trip. A step's places
for the next one's values are made once it has given its own, while the other hosts compute. With
them, the one that decides tells which feeds the next step takes; small values that it gives go in
the same message.

The thread that runs the loop.
"""

from __future__ import annotations

from collections.abc import Sequence
from struct import Struct

from heliograph_backends.contract import Abort, Tensor, access
from heliograph_proto import commands as c
from heliograph_proto.errors import CancelledError, HeliographError, InternalError
from heliograph_proto.plans import Port
from heliograph_server.exchange.edges import LATE_STEPS, IncomingValues
from heliograph_server.plans.loaded_plan import PlanCopy
from heliograph_server.resources.feed_order import ToldFeeds

#: Whether a step follows; and the fields of `ToldFeeds` where the loop is fed.
_TOLD, _TOLD_FEEDS = Struct("<?"), Struct("<?QQ")


class StepLinks:
    """The edges of one loop. `first` is the run's number of its first step."""

    def __init__(
        self,
        copy: PlanCopy,
        exchange: c.LoopExchange,
        first: int,
        inputs: Sequence[Port],
        outputs: Sequence[Port],
    ) -> None:
        ports = copy.loop_ports
        assert ports is not None, "the edges that the command was checked for"
        self._ports, self._exchange, self._first = ports, exchange, first
        #: By side of the step that receives them.
        self._taken = [
            [copy.taken_for(place, side, inputs[place].type) for _, place in exchange.takes]
            for side in (0, 1)
        ]
        self._told = _TOLD_FEEDS if exchange.fed else _TOLD
        #: The inputs that come with what is told, by side.
        self._with = [
            [copy.taken_for(place, side, inputs[place].type) for place in exchange.told_with]
            for side in (0, 1)
        ]
        told_bytes = self._told.size + sum(one.type.nbytes for one in self._with[0])
        heard = [told_bytes] * (exchange.told is not None) + [1] * len(exchange.awaits)
        self._heard = [copy.mark_for(number, size) for number, size in enumerate(heard)]
        #: By departure: what is told, and the outputs that go with it.
        self._tells = [self._telling(copy, one, outputs) for one in exchange.tells]
        self._signal = copy.mark_for("signal", 1)
        #: The feeds that the next step takes, as another partition told.
        self.told_feeds: ToldFeeds | None = None
        self._incoming: IncomingValues | None = None
        self._step = self._most = 0
        #: True if others may still have to take what the last step gave.
        self._is_awaited = False

    def __repr__(self) -> str:
        return f"<StepLinks {self._exchange}>"

    def _telling(
        self, copy: PlanCopy, departure: int, outputs: Sequence[Port]
    ) -> tuple[int, Tensor, list[int]]:
        made = [place for one, place in self._exchange.tells_with if one == departure]
        size_bytes = self._told.size + sum(outputs[place].type.nbytes for place in made)
        return departure, copy.mark_for(("tell", departure), size_bytes), made

    @property
    def decides(self) -> bool:
        """True if this partition decides whether a step follows."""
        return self._exchange.told is None

    def fed(self, inputs: Sequence[Tensor], side: int) -> Sequence[Tensor]:
        """Return the inputs of a step that receives on this side."""
        found = list(inputs)
        exchange = self._exchange
        for (_, place), tensor in zip(exchange.takes, self._taken[1 - side], strict=True):
            found[place] = tensor
        for place, tensor in zip(exchange.told_with, self._with[1 - side], strict=True):
            found[place] = tensor
        return found

    def begin(self, step: int, most: int) -> None:
        """Begin a step of at most so many. The first one asks for the next one's values at once."""
        self._step, self._most, self._incoming = step, most, None
        if not step:
            self._expect()

    def _expect(self) -> None:
        """Begin to fetch what the next step needs."""
        step, most = self._step, self._most
        if self._incoming is None and step + 1 < most:
            targets = [*self._heard, *self._taken[step % 2]]
            self._ports.expect_runs(self._first + most - 2)
            self._incoming = self._ports.expect(self._first + step, targets, self._exchange.arrivals)
            if step + 2 < most:
                self._incoming.ask_ahead()
            # It is over for long, but a step that follows must not wait for that.
            self._ports.leave(self._first + step - 1)

    def give(
        self, outputs: Sequence[Tensor | None], abort: Abort, feeds: ToldFeeds, *, follows: bool
    ) -> None:
        """Give the others what a step made, unless it was the last one of all, and tell them which
        feeds the next one takes."""
        run, exchange = self._first + self._step, self._exchange
        fields = (follows, feeds.through, feeds.withdrawn) if exchange.fed else (follows,)
        for departure, told, made in self._tells:
            parts = [self._told.pack(*fields)]
            parts += [bytes(access.read_whole(_there(outputs[place]))) for place in made]
            access.write(told, 0, memoryview(b"".join(parts)))
            self._ports.offer(departure, run, told, abort)
        self._is_awaited = bool(exchange.tells)
        if follows:
            for departure, place in exchange.gives:
                self._ports.offer(departure, run, _there(outputs[place]), abort)
            for departure in exchange.signals:
                self._ports.offer(departure, run, self._signal, abort)
            self._expect()

    def follows(self, abort: Abort) -> bool:
        """Wait for what the next step needs. False if none follows. Raises as
        `IncomingValues.wait`."""
        incoming = self._incoming
        assert incoming is not None
        for number, heard in enumerate(self._heard):
            incoming.wait(number, abort)
            is_told = not number and not self.decides
            if is_told and not self._hear(memoryview(access.read_whole(heard))):
                return False
        for place in range(len(self._heard), len(self._exchange.arrivals)):
            incoming.wait(place, abort)
        return True

    def _hear(self, told: memoryview) -> bool:
        """Take what is told, and the inputs behind it. False if no step follows."""
        follows, *fields = self._told.unpack_from(told)
        at = self._told.size
        for tensor in self._with[self._step % 2]:
            access.write(tensor, 0, told[at : at + tensor.type.nbytes])
            at += tensor.type.nbytes
        self.told_feeds = ToldFeeds(*fields)
        return bool(follows)

    def end(self, error: BaseException | None) -> None:
        """End the loop here. The others receive the error, or take what they were told."""
        run = self._first + self._step
        self._ports.leave(run - 1)
        if error is None:
            # Values that were given for a step that does not follow are dropped.
            self._ports.end(run, None if self._is_awaited else CancelledError("the loop has ended"))
            return
        failure = error if isinstance(error, HeliographError) else InternalError(f"a step failed: {error}")
        for late in range(max(self._first, run - LATE_STEPS), run + 1):
            self._ports.end(late, failure)


def _there(tensor: Tensor | None) -> Tensor:
    assert tensor is not None, "a step has all outputs that others take"
    return tensor
