"""What a session may have computed: its commands one after the other, in the order of their numbers.

Commands of several streams run beside each other, but those that share tensors run in their order. So
every successful read has the bytes that it would have if nothing ran beside it. A failed command leaves
the bytes that it was to write unusable until they are written again.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

from heliograph_proto import commands as c
from heliograph_proto.errors import HeliographError
from simulation.plans import PLANS, SIZE, SimulatedPlan
from simulation.world import hold


@dataclass(slots=True)
class Report:
    """A command as the server received it, and its outcome."""

    sequence: int
    kind: c.CommandKind
    #: The bytes that it writes, of a transfer.
    data: bytes = b""
    error: HeliographError | None = None
    #: True if its work began, so that a failure may have torn its bytes.
    began: bool = False
    #: True if the variable that it assigns may have a part of its new value.
    torn: bool = False
    #: The whole steps of a loop that failed.
    done: int = 0
    #: The bytes that it read, or of its fetched output.
    seen: bytes | None = None
    #: The values that its loop sent.
    streamed: list[bytes] = field(default_factory=list)
    steps: int = 1


@dataclass(slots=True)
class Storage:
    """Bytes, and for each the failed commands that were to write it; torn ones have no value."""

    data: bytearray
    blamed: list[frozenset[int]]
    torn: list[bool]

    @classmethod
    def of(cls, size: int) -> Storage:
        return cls(bytearray(size), [frozenset()] * size, [False] * size)


@dataclass(frozen=True, slots=True)
class Span:
    """A tensor: bytes of a storage."""

    storage: Storage
    start: int
    size: int

    def part(self, offset: int, size: int) -> Span:
        return Span(self.storage, self.start + offset, size)

    @property
    def _range(self) -> range:
        return range(self.start, self.start + self.size)

    @property
    def data(self) -> bytes:
        return bytes(self.storage.data[self.start : self.start + self.size])

    @property
    def blamed(self) -> frozenset[int]:
        return frozenset().union(*(self.storage.blamed[i] for i in self._range))

    @property
    def is_torn(self) -> bool:
        return any(self.storage.torn[i] for i in self._range)

    def write(self, data: bytes) -> None:
        for i, byte in zip(self._range, data, strict=True):
            self.storage.data[i], self.storage.blamed[i], self.storage.torn[i] = byte, frozenset(), False

    def spoil(self, root: int, torn: bool) -> None:
        for i in self._range:
            self.storage.blamed[i] |= {root}
            self.storage.torn[i] |= torn


class SerialModel:
    """Replays the reports of a session. `guilty` are the commands that something happened to."""

    def __init__(self, guilty: set[int]) -> None:
        self._guilty = guilty
        self._tensors: dict[int, Span] = {}
        self._variables = {"v": Span(Storage.of(SIZE), 0, SIZE)}

    def replay(self, reports: Iterable[Report]) -> None:
        """Check every report. Raises Violation."""
        for one in reports:
            self._check_error(one)
            match one.kind:
                case c.Allocate(tensor=number, type=type):
                    self._make(number, type.nbytes, one)
                case c.View(tensor=number, source=source, offset_bytes=offset, type=type):
                    if source in self._tensors:
                        self._tensors[number] = self._tensors[source].part(offset, type.nbytes)
                case c.SetTensor(tensor=number, offset_bytes=offset):
                    self._write(one, number, offset, bytes(one.kind.data or one.data))
                case c.Memset(tensor=number, offset_bytes=offset, size_bytes=size, value=value):
                    self._write(one, number, offset, bytes([value]) * size)
                case c.CopyTensor(source=source, destination=number):
                    if one.error is None:
                        self._use(one, self._tensors[source])
                        self._tensors[number].write(self._tensors[source].data)
                    else:
                        self._spoil(one, self._tensors[number])
                case c.GetTensor(tensor=number, offset_bytes=offset, size_bytes=size):
                    if one.error is None:
                        source_span = self._tensors[number].part(offset, size)
                        self._use(one, self._tensors[number])
                        hold(
                            one.seen == source_span.data, f"{one} read {one.seen!r}, not {source_span.data!r}"
                        )
                case c.RunCommand():
                    self._run(one, one.kind)

    def _check_error(self, one: Report) -> None:
        """A command fails for something that happened to it, or to a command before it."""
        if one.error is None or isinstance(one.kind, c.Continue):
            # A loop may end before it hears that its values were read.
            return
        if "left half written" in one.error.message:
            hold(self._variables["v"].is_torn, f"{one} fails for a variable that is whole")
            return
        root = one.error.origin.sequence or one.sequence
        hold(root <= one.sequence, f"{one} fails for a later command, {root}")
        hold(root in self._guilty, f"{one} fails for command {root}, to which nothing happened")

    def _use(self, one: Report, span: Span) -> None:
        hold(not span.is_torn, f"{one} succeeded on bytes that {set(span.blamed)} left torn")

    def _spoil(self, one: Report, span: Span) -> None:
        assert one.error is not None
        span.spoil(one.error.origin.sequence or one.sequence, one.began)

    def _make(self, number: int, size: int, one: Report) -> Span:
        made = self._tensors[number] = Span(Storage.of(size), 0, size)
        if one.error is not None:
            made.spoil(one.error.origin.sequence or one.sequence, torn=True)
        return made

    def _write(self, one: Report, number: int, offset: int, data: bytes) -> None:
        if one.error is not None:
            self._spoil(one, self._tensors[number].part(offset, _size(one)))
        else:
            self._tensors[number].part(offset, len(data)).write(data)

    def _run(self, one: Report, run: c.RunCommand) -> None:
        plan = PLANS[run.plan]
        variable = self._variables["v"]
        wanted = run.outputs[0] if run.outputs else c.OutputBinding(0)
        new = self._make(wanted.tensor, SIZE, one) if wanted.tensor else None
        into = self._tensors[wanted.into] if wanted.into else None
        given = run.inputs[0]
        x = self._tensors[given.tensor].data if given.data is None else bytes(given.data)
        if one.error is not None:
            if plan.assigns and one.torn:
                self._spoil(one, variable)
            elif plan.assigns and one.began:
                self._keep_steps(plan, variable, x, one.done)
            if into is not None:
                self._spoil(one, into)
            return
        if given.data is None:
            self._use(one, self._tensors[given.tensor])
        uses = plan.reads or plan.assigns
        if uses:
            self._use(one, variable)
        v = variable.data if uses else bytes(SIZE)
        streamed = []
        y = x
        for _ in range(one.steps):
            y, v = plan.step(x, v)
            x = y
            streamed.append(y)
        if plan.assigns:
            variable.write(v)
        for span in (new, into):
            if span is not None:
                span.write(y)
        if wanted.fetch:
            hold(one.seen == y, f"{one} gave {one.seen!r}, not {y!r}")
        if run.loop is not None and run.loop.taps:
            hold(one.streamed == streamed, f"{one} streamed {one.streamed}, not {streamed}")

    def _keep_steps(self, plan: SimulatedPlan, variable: Span, x: bytes, steps: int) -> None:
        """A loop that was cancelled leaves the variable as its last whole step did."""
        v = variable.data
        for _ in range(steps):
            x, v = plan.step(x, v)
        if steps:
            variable.write(v)


def _size(one: Report) -> int:
    """The bytes that a write was to write."""
    match one.kind:
        case c.SetTensor(data=data, size_bytes=size):
            return size if data is None else len(data)
        case c.Memset(size_bytes=size):
            return size
    raise AssertionError(one.kind)
