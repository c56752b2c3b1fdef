"""Templates for runs that are one small message each way.

A plan that runs often sends the same message each time, except for the command's number and the
bytes of its inputs; so does its completion. The constant part is encoded once, as a `Template`:
writing a message joins bytes, and reading one compares them, at a fraction of the cost of a message
object. The bytes are those that protobuf writes. Messages with another encoding or other fields are
decoded by protobuf; `heliograph_proto.codec.inline_runs` decides.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from struct import Struct

from heliograph_proto import commands as c
from heliograph_proto.errors import HeliographError
from heliograph_proto.trace_context import TRACE_BYTES, sampled


def varint(number: int) -> bytes:
    """Encode a number of 0 or more as protobuf does."""
    if number < 0x80:
        return bytes((number,))
    if number < 0x4000:
        return bytes((number & 0x7F | 0x80, number >> 7))
    found = bytearray()
    while number >= 0x80:
        found.append(number & 0x7F | 0x80)
        number >>= 7
    found.append(number)
    return bytes(found)


_DOUBLE = Struct("<d")
#: The tag of `commands` in CommandBatch, and of `completions` in CompletionBatch.
FRAME_TAG = b"\x12"
#: The tag of `sequence` in Command and in Completion.
_SEQUENCE_TAG = b"\x08"
#: The tag of `trace_parent` in Run.
_TRACE_TAG = varint(50 << 3 | 2)


class Template:
    """The bytes of a command or completion after its sequence number, with holes of fixed sizes."""

    __slots__ = ("_fixed", "_heads", "_holes", "_segments", "size_bytes")

    def __init__(self, segments: Sequence[bytes], hole_bytes: Sequence[int]) -> None:
        """There is one more segment than holes: each hole lies between two segments."""
        self._segments = tuple(segments)
        #: Non-empty segments and their offsets.
        self._fixed: list[tuple[bytes, int]] = []
        self._holes: list[tuple[int, int]] = []
        #: The bytes before the sequence number, by its encoded length.
        self._heads: dict[int, bytes] = {}
        at = 0
        for segment, size in zip(segments, (*hole_bytes, 0), strict=True):
            if segment:
                self._fixed.append((segment, at))
            at += len(segment)
            self._holes.append((at, at + size))
            at += size
        self._holes.pop()
        self.size_bytes = at

    def frame(self, sequence: int, holes: Iterable[bytes]) -> bytes:
        """Return the message with its tag and its length, as an element of a batch."""
        number = varint(sequence)
        head = self._heads.get(len(number))
        if head is None:
            length = len(_SEQUENCE_TAG) + len(number) + self.size_bytes
            head = self._heads[len(number)] = FRAME_TAG + varint(length) + _SEQUENCE_TAG
        segments = self._segments
        parts = [head, number, segments[0]]
        for place, data in enumerate(holes, 1):
            parts += (data, segments[place])
        return b"".join(parts)

    def match(self, buffer: bytes, start: int) -> list[bytes] | None:
        """Return the contents of the holes if the rest matches, else None.

        The buffer must have `size_bytes` after `start`.
        """
        for segment, offset in self._fixed:
            if not buffer.startswith(segment, start + offset):
                return None
        return [buffer[start + first : start + end] for first, end in self._holes]


class RunForm:
    """The constant part of a run: all but its number, the bytes of its inputs, and its traceparent.

    The run is on the default stream, with all inputs in its command and all fetched outputs in its
    completion.
    """

    __slots__ = ("inputs", "is_traced", "outputs", "plan", "template", "timeout_ms")

    def __init__(
        self,
        plan: int,
        inputs: Sequence[tuple[int, int]],
        outputs: Sequence[int],
        timeout_ms: int = 0,
        is_traced: bool = False,
    ) -> None:
        """`inputs`: places and sizes in bytes; `outputs`: places."""
        self.timeout_ms = timeout_ms
        #: True if its runs have a traceparent.
        self.is_traced = is_traced
        self.plan = plan
        self.inputs = tuple(inputs)
        self.outputs = tuple(outputs)
        self.template = _run_template(self)

    def __repr__(self) -> str:
        return f"<RunForm of plan {self.plan}: {len(self.inputs)} inputs, {len(self.outputs)} outputs>"


class InlineRun:
    """A run command of a `RunForm`. Its number is 0 until it is sent."""

    __slots__ = ("form", "inputs", "sequence", "trace_parent")

    def __init__(
        self, form: RunForm, inputs: Sequence[bytes], sequence: int = 0, trace_parent: str = ""
    ) -> None:
        self.form = form
        self.inputs = inputs
        self.sequence = sequence
        #: TRACE_BYTES of ASCII if its form is traced.
        self.trace_parent = trace_parent

    def __repr__(self) -> str:
        return f"<InlineRun {self.sequence} of plan {self.form.plan}>"

    def frame(self) -> bytes:
        """Encode it as an element of a CommandBatch."""
        form = self.form
        if form.is_traced:
            return form.template.frame(self.sequence, (*self.inputs, self.trace_parent.encode()))
        return form.template.frame(self.sequence, self.inputs)

    @classmethod
    def traced(cls, form: RunForm, sequence: int, holes: list[bytes]) -> InlineRun | None:
        """Return the run with these contents of a traced form's holes; None if the trace is not
        ASCII."""
        trace = holes.pop()
        return cls(form, holes, sequence, sampled(trace.decode())) if trace.isascii() else None

    def command(self) -> c.Command:
        """Return the run as an ordinary command."""
        form = self.form
        bindings = (
            c.InputBinding(one, data) for (one, _), data in zip(form.inputs, self.inputs, strict=True)
        )
        outputs = tuple(c.OutputBinding(one, fetch=True) for one in form.outputs)
        run = c.RunCommand(form.plan, tuple(bindings), outputs, trace_parent=self.trace_parent)
        return c.Command(self.sequence, run, notify=True, timeout_ms=form.timeout_ms)


class ResultForm:
    """The constant part of an inline run's completion: all but its number, bytes and duration."""

    __slots__ = ("outputs", "template")

    def __init__(self, outputs: Sequence[tuple[int, int]]) -> None:
        """`outputs`: places and sizes in bytes, each 1 or more."""
        self.outputs = tuple(outputs)
        self.template = _result_template(self)

    def __repr__(self) -> str:
        return f"<ResultForm of {len(self.outputs)} outputs>"


class InlineResult:
    """The successful completion of an inline run, of a `ResultForm`."""

    __slots__ = ("data_of_outputs", "device_us", "form", "sequence")

    error: HeliographError | None = None
    data: c.Bytes = b""
    copy_path = None
    steps = 0

    def __init__(
        self, form: ResultForm, sequence: int, data_of_outputs: Sequence[bytes], device_us: float
    ) -> None:
        """`device_us` must not be 0, which protobuf would not encode."""
        self.form = form
        self.sequence = sequence
        self.data_of_outputs = data_of_outputs
        self.device_us = device_us

    def __repr__(self) -> str:
        return f"<InlineResult of command {self.sequence}>"

    @property
    def outputs(self) -> tuple[tuple[int, c.Bytes], ...]:
        """The pairs of place and bytes, as in Completion."""
        pairs = zip(self.form.outputs, self.data_of_outputs, strict=True)
        return tuple((place, data) for (place, _), data in pairs)

    def frame(self) -> bytes:
        """Encode it as an element of a CompletionBatch."""
        return self.form.template.frame(self.sequence, (*self.data_of_outputs, _DOUBLE.pack(self.device_us)))

    @classmethod
    def matched(cls, form: ResultForm, sequence: int, holes: list[bytes]) -> InlineResult:
        """Return the result with these contents of the holes of its form's template."""
        return cls(form, sequence, holes, *_DOUBLE.unpack(holes.pop()))


def _run_template(form: RunForm) -> Template:
    segments = [b"\x08" + varint(form.plan)]
    for place, size in form.inputs:
        head = _place(place) + b"\x12" + varint(size)
        segments[-1] += b"\x12" + varint(len(head) + size) + head
        segments.append(b"")
    for place in form.outputs:
        binding = _place(place) + b"\x18\x01"
        segments[-1] += b"\x1a" + varint(len(binding)) + binding
    sizes = [size for _, size in form.inputs]
    if form.is_traced:
        segments[-1] += _TRACE_TAG + varint(TRACE_BYTES)
        segments.append(b"")
        sizes.append(TRACE_BYTES)
    # Command.notify and Command.timeout_ms, then Command.run.
    head = b"\x18\x01" + (b"\x20" + varint(form.timeout_ms) if form.timeout_ms else b"")
    segments[0] = head + b"\x62" + varint(sum(map(len, segments)) + sum(sizes)) + segments[0]
    return Template(segments, sizes)


def _result_template(form: ResultForm) -> Template:
    segments = [b""]
    for place, size in form.outputs:
        head = _place(place) + b"\x12" + varint(size)
        segments[-1] += b"\x22" + varint(len(head) + size) + head
        segments.append(b"")
    # Completion.device_us.
    segments[-1] += b"\x29"
    return Template((*segments, b""), [*(size for _, size in form.outputs), _DOUBLE.size])


def _place(place: int) -> bytes:
    """Encode InputBinding.input, OutputBinding.output or OutputValue.output; protobuf omits 0."""
    return b"\x08" + varint(place) if place else b""
