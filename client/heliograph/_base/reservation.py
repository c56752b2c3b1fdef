"""`hg.Reservation`: memory for the largest graph, taken once; the same for both APIs."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from types import MappingProxyType

from heliograph.core.effects import Procedure, ask
from heliograph.core.methods import RESERVE
from heliograph.core.replay.journal import MadePlan
from heliograph.core.shell import Handle, Shell
from heliograph.graph.builder import Graph
from heliograph.procedures.compile import with_source
from heliograph_proto.errors import HeliographError, InvalidArgumentError
from heliograph_proto.plans import PlanOptions, ReserveRequest


class Reservation(Handle):
    """Memory of devices for the plans that are compiled after it. Made by `session.reserve`.

    It lasts until `reset` or the end of the session, even if this object is garbage collected.
    """

    _kind = "reservation"

    def __init__(self, shell: Shell, handle: int, sizes: Mapping[str, int], *, owned: bool = False) -> None:
        super().__init__(shell, handle, owned=owned)
        #: Bytes by device name; 0 for a device whose plans use their own memory.
        self.devices: Mapping[str, int] = MappingProxyType(dict(sizes))

    @property
    def size_bytes(self) -> int:
        """The bytes on all devices."""
        return sum(self.devices.values())

    def __repr__(self) -> str:
        return f"<Reservation of {self.size_bytes:,} bytes on {', '.join(self.devices)}, {self._state}>"

    def reset(self) -> None:
        """Give the memory back once the runs that were sent before are done. Idempotent.

        Plans in it raise UnknownHandleError from then on; their results remain.
        """
        if not self._freed:
            self._owned = True
            if self._shell.core.reservation == self._handle:
                self._shell.core.reservation = 0
            self.free()


def reserve_graph(shell: Shell, graph: Graph, options: PlanOptions) -> Procedure[Reservation]:
    """Reserve memory for plans as large as that of a graph; errors name the user's lines.

    Raises InvalidArgumentError while the session has another reservation.
    """
    _check_none(shell)
    try:
        made = yield from reserve_blocks(shell, options, graph=graph)
    except HeliographError as error:
        raise with_source(error, graph._source_of) from None
    try:
        _check_none(shell)
    except InvalidArgumentError:
        made.reset()
        raise
    shell.core.reservation = made._handle
    return made


def reserve_blocks(
    shell: Shell, options: PlanOptions, block_bytes: Sequence[int] = (), graph: Graph | None = None
) -> Procedure[Reservation]:
    """Reserve memory for a graph, or blocks of these sizes, for compilations that name it."""
    handle = shell.core.handle()
    largest = None if graph is None else graph._outline()
    request = ReserveRequest(handle, largest, options, tuple(block_bytes))
    core = shell.core
    after = core.last_sent
    sizes = yield from ask(RESERVE, request)
    if core.journal is not None:
        core.journal.made(MadePlan(request, {}, after, core.last_sent))
    return Reservation(shell, handle, sizes)


def _check_none(shell: Shell) -> None:
    if shell.core.reservation and shell.core.lost is None:
        raise InvalidArgumentError(
            "the session already has a reservation", advice="reset it first: reservation.reset()"
        )
