"""Commands and completions as frozen dataclasses, without protobuf.

command.proto documents each field, under the same name.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, TypeAlias

from heliograph_proto.devices import CopyPath, Usage
from heliograph_proto.errors import HeliographError, InvalidArgumentError, LoopEndedError
from heliograph_proto.plans import Edge, PeerSource, Port
from heliograph_proto.types import TensorType

if TYPE_CHECKING:
    from heliograph_proto.codec.inline_forms import InlineResult
    from heliograph_proto.devices import DeviceChange

#: Bytes inside a command or a completion. A client may pass a view of an array.
Bytes: TypeAlias = bytes | bytearray | memoryview

#: The server sets this bit in the handles that it makes; a client's handles must not have it.
SERVER_HANDLE = 1 << 63
#: The stream that exists from the start.
DEFAULT_STREAM = 0
#: The most steps of a loop, and the longest time for which its values may gather.
MAX_LOOP_STEPS = 1_000_000_000
MOST_GATHER_MS = 1000
#: The overhead counted for each value that a loop streams, beyond its bytes.
STREAMED_VALUE_BYTES = 512
#: The most bytes of values that go with what one partition of a loop tells another.
MAX_TOLD_BYTES = 4096
#: The overhead counted for each feed of a loop that waits, beyond its bytes.
FEED_BYTES = 512


@dataclass(frozen=True, slots=True)
class Allocate:
    tensor: int
    type: TensorType
    device: str = ""
    #: Empty: the device's default.
    buffer_type: str = ""
    usage: Usage = Usage.ANY


@dataclass(frozen=True, slots=True)
class AllocateBuffer:
    buffer: int
    size_bytes: int
    device: str = ""
    buffer_type: str = ""
    usage: Usage = Usage.ANY
    #: In process only: memory that backs the buffer; kept alive and not copied.
    memory: memoryview | None = None


@dataclass(frozen=True, slots=True)
class AllocateTensors:
    buffer: int
    #: (handle, type) of each.
    tensors: tuple[tuple[int, TensorType], ...]
    device: str = ""
    buffer_type: str = ""
    usage: Usage = Usage.ANY


@dataclass(frozen=True, slots=True)
class PlaceTensor:
    tensor: int
    buffer: int
    offset_bytes: int
    type: TensorType


@dataclass(frozen=True, slots=True)
class SetUsage:
    buffer: int
    usage: Usage


@dataclass(frozen=True, slots=True)
class ClearBuffer:
    buffer: int
    value: int


@dataclass(frozen=True, slots=True)
class ResetBuffer:
    buffer: int


@dataclass(frozen=True, slots=True)
class Chunks:
    """Pieces of equal size at equal distances in a tensor; packed on the wire."""

    size_bytes: int
    count: int = 1
    stride_bytes: int = 0

    @property
    def total_bytes(self) -> int:
        return self.size_bytes * self.count

    @property
    def extent_bytes(self) -> int:
        """The distance from the first byte of the first piece to the end of the last one."""
        return (self.count - 1) * self.stride_bytes + self.size_bytes if self.total_bytes else 0


@dataclass(frozen=True, slots=True)
class View:
    tensor: int
    source: int
    offset_bytes: int
    type: TensorType
    #: Empty: contiguous.
    strides_bytes: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class CreateStream:
    stream: int
    device: str = ""


@dataclass(frozen=True, slots=True)
class SetTensor:
    """`data` is None if a transfer carries the bytes, or they lie in shared memory."""

    tensor: int
    offset_bytes: int
    data: Bytes | None = None
    transfer: int = 0
    #: The size of the transfer, or of the bytes in shared memory.
    size_bytes: int = 0
    chunks: Chunks | None = None
    #: The place of the bytes in shared memory; None: they are not there.
    shared: int | None = None


@dataclass(frozen=True, slots=True)
class GetTensor:
    tensor: int
    offset_bytes: int
    size_bytes: int
    #: 0: the bytes come in the completion, or in shared memory.
    transfer: int = 0
    chunks: Chunks | None = None
    #: The place for the bytes in shared memory; None: they do not go there.
    shared: int | None = None


@dataclass(frozen=True, slots=True)
class Memset:
    tensor: int
    offset_bytes: int
    size_bytes: int
    value: int


@dataclass(frozen=True, slots=True)
class CopyTensor:
    source: int
    destination: int


@dataclass(frozen=True, slots=True)
class OfferTensor:
    tensor: int
    edge: Edge
    run: int


@dataclass(frozen=True, slots=True)
class FetchTensor:
    tensor: int
    edge: Edge
    run: int
    source: PeerSource


@dataclass(frozen=True, slots=True)
class InputBinding:
    """`data` is None if a tensor is bound."""

    input: int
    data: Bytes | None = None
    tensor: int = 0


@dataclass(frozen=True, slots=True)
class OutputBinding:
    output: int
    #: 0: no tensor.
    tensor: int = 0
    fetch: bool = False
    #: An existing tensor to write; 0: none.
    into: int = 0


@dataclass(frozen=True, slots=True)
class Carry:
    output: int
    input: int


@dataclass(frozen=True, slots=True)
class LoopExchange:
    """The values that a partition exchanges with the others between two steps of a loop.

    Arrivals and departures are places in `Partition.loop_arrivals` and `loop_departures`.
    """

    #: (departure, output) of each.
    gives: tuple[tuple[int, int], ...] = ()
    #: (arrival, input) of each.
    takes: tuple[tuple[int, int], ...] = ()
    #: Departures that tell whether a step follows.
    tells: tuple[int, ...] = ()
    #: The arrival that tells whether a step follows; None: this partition decides.
    told: int | None = None
    #: Departures and arrivals of bytes that only keep steps together.
    signals: tuple[int, ...] = ()
    awaits: tuple[int, ...] = ()
    #: True if all partitions take the loop's feeds, before the same step.
    fed: bool = False
    #: (departure of `tells`, output) of each output that goes with it, and the inputs that come with
    #: `told`.
    tells_with: tuple[tuple[int, int], ...] = ()
    told_with: tuple[int, ...] = ()

    @property
    def given(self) -> tuple[int, ...]:
        """The outputs that others take."""
        return tuple(place for _, place in (*self.gives, *self.tells_with))

    @property
    def departures(self) -> tuple[int, ...]:
        """All departures that the loop uses."""
        return (*(one for one, _ in self.gives), *self.tells, *self.signals)

    @property
    def arrivals(self) -> tuple[int, ...]:
        """All arrivals that the loop uses."""
        told = () if self.told is None else (self.told,)
        return (*told, *self.awaits, *(one for one, _ in self.takes))


@dataclass(frozen=True, slots=True)
class Loop:
    steps: int
    carries: tuple[Carry, ...] = ()
    #: The output that ends the loop; None: only `steps` ends it.
    until: int | None = None
    #: Outputs to stream.
    taps: tuple[int, ...] = ()
    unread_bytes: int = 0
    #: Inputs that feeds may replace, and the most bytes of feeds that wait.
    fed_inputs: tuple[int, ...] = ()
    fed_bytes: int = 0
    #: Set for a partition.
    exchange: LoopExchange | None = None
    #: True if the client is told of complete steps now and then.
    counts_steps: bool = False
    #: The time for which small outputs that it streams may wait for others; 0: a short one.
    gather_ms: int = 0

    @property
    def is_fed(self) -> bool:
        """True if it takes feeds, of which a partition may need none of the values."""
        return bool(self.fed_inputs) or (self.exchange is not None and self.exchange.fed)


@dataclass(frozen=True, slots=True)
class RunCommand:
    plan: int
    inputs: tuple[InputBinding, ...]
    outputs: tuple[OutputBinding, ...]
    #: True if the run waits for `Continue` after each observed node.
    pause: bool = False
    #: None: it runs once.
    loop: Loop | None = None
    #: If the plan is a partition: the run of the whole graph, or that of a loop's first step; else 0.
    exchange_run: int = 0
    #: The W3C traceparent of a sampled span; "": not traced.
    trace_parent: str = ""


@dataclass(frozen=True, slots=True)
class Record:
    event: int


@dataclass(frozen=True, slots=True)
class WaitCommand:
    event: int


@dataclass(frozen=True, slots=True)
class Free:
    handles: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Skip:
    """Passes over commands of a restored session, up to `through`.

    With an error, they cannot be done again: what they were to write, `lost`, is poisoned with it.
    """

    through: int
    error: HeliographError | None = None
    lost: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class FreeVariable:
    name: str


@dataclass(frozen=True, slots=True)
class Synchronize:
    pass


@dataclass(frozen=True, slots=True)
class Cancel:
    sequence: int
    #: True: a loop ends after its present step, with a result.
    after_step: bool = False


@dataclass(frozen=True, slots=True)
class Continue:
    sequence: int
    #: Of a loop's streamed values.
    taken_bytes: int = 0


@dataclass(frozen=True, slots=True)
class FeedLoop:
    sequence: int
    #: (input's place, bytes) of each.
    values: tuple[tuple[int, Bytes], ...]
    #: Empty: the values are whole inputs.
    rows: tuple[int, ...] = ()
    #: For a loop of a partition: its number, and that of the last one before it that no step takes
    #: together with it.
    number: int = 0
    apart_from: int = 0

    @property
    def waiting_bytes(self) -> int:
        """The bytes that it counts while it waits (`Loop.fed_bytes`)."""
        return sum(len(data) for _, data in self.values) + 4 * len(self.rows) + FEED_BYTES


CommandKind: TypeAlias = (
    Allocate
    | View
    | CreateStream
    | SetTensor
    | GetTensor
    | Memset
    | CopyTensor
    | OfferTensor
    | FetchTensor
    | RunCommand
    | Record
    | WaitCommand
    | Free
    | FreeVariable
    | Skip
    | Synchronize
    | Cancel
    | AllocateBuffer
    | AllocateTensors
    | PlaceTensor
    | SetUsage
    | ClearBuffer
    | ResetBuffer
    | Continue
    | FeedLoop
)


@dataclass(frozen=True, slots=True)
class Command:
    """One command of the stream."""

    sequence: int
    kind: CommandKind
    stream: int = DEFAULT_STREAM
    notify: bool = False
    #: 0: none.
    timeout_ms: int = 0


@dataclass(frozen=True, slots=True)
class Completion:
    """The end of one command."""

    sequence: int
    error: HeliographError | None = None
    data: Bytes = b""
    #: (output's place, bytes) of a run.
    outputs: tuple[tuple[int, Bytes], ...] = ()
    device_us: float = 0.0
    #: Of a copy.
    copy_path: CopyPath | None = None
    #: Of a loop, or before a feed was taken.
    steps: int = 0


@dataclass(frozen=True, slots=True)
class TapPiece:
    """A part of the value of a node that a run observes, or of an output of a loop."""

    sequence: int
    node: int
    offset_bytes: int
    data: Bytes
    last: bool
    #: Of a loop.
    step: int = 0
    #: The output whose value this is; `node` is then unused.
    output: int | None = None
    #: `Loop.gather_ms` of a value that may wait for others before it is sent, else None. Not on the
    #: wire.
    gather_ms: int | None = field(default=None, compare=False)


@dataclass(frozen=True, slots=True)
class Attach:
    """The continuation of a session on a new stream."""

    #: The completion messages that the client has received.
    received: int
    #: Of the daemon, as the client knows it.
    incarnation: bytes = b""


@dataclass(frozen=True, slots=True)
class ResumedLoop:
    """A loop that goes on after some of its steps."""

    sequence: int
    #: Those that are complete, whose values do not come again, but for the last ones of the last
    #: step.
    steps: int
    unsent: int = 0


@dataclass(frozen=True, slots=True)
class Attached:
    """The server's answer to `Attach`."""

    #: The last command that it has received.
    last_sequence: int
    #: The number of the next completion message.
    next_message: int
    #: True if it has restarted and restored the session.
    restored: bool = False
    #: Of the daemon.
    incarnation: bytes = b""
    #: Loops that go on from a step when their commands have come again.
    loops: tuple[ResumedLoop, ...] = ()


@dataclass(frozen=True, slots=True)
class Acknowledged:
    """The part of a batch of commands that lets the server drop what it keeps for a lease."""

    #: The completion messages that the client has received; 0: it does not say.
    received: int = 0
    #: Transfers whose bytes it has received.
    downloaded: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class CompletionBatch:
    """Ended commands: all up to `completed_through`, and those in `completions`.

    `changes`, and then `taps`, precede the completions. One with `attached` has nothing else.
    """

    completed_through: int
    completions: tuple[Completion | InlineResult, ...] = ()
    taps: tuple[TapPiece, ...] = ()
    changes: tuple[DeviceChange, ...] = ()
    attached: Attached | None = None
    #: The state after every command up to this number is on the server's disk; 0: it does not say.
    durable_through: int = 0
    #: The daemon to which the server wishes the session to move; empty: it may stay.
    move_to: str = ""
    #: The complete steps of loops that go on, by their sequence numbers.
    steps: tuple[tuple[int, int], ...] = ()


def loop_ended(why: HeliographError | None = None) -> LoopEndedError:
    """Return the error of a feed that no step took; `why`: the error with which the loop ended."""
    reason = "" if why is None else f": {why.message}"
    return LoopEndedError(
        f"the loop ended before a step took the feed{reason}",
        advice="start another loop with these values as its first inputs",
    )


def check_until(port: Port) -> None:
    """Check that an output can end a loop. Raises InvalidArgumentError."""
    dtype = port.type.dtype
    if port.type.size != 1 or not (dtype.kind == "bool" or dtype.is_integer):
        raise InvalidArgumentError(
            f"output {port.name!r} is {port.type}; only one bool or integer can end a loop",
            advice="reduce it in the graph to one truth value: hg.any(x)",
        )
