"""Sessions, devices and plans in a notebook, for both APIs.

A view never holds a notebook up: it asks the server only where the shell can wait in this thread,
within `LOOK_SECONDS`, and shows the rest without the answer.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, TypeVar

from heliograph.core.effects import Procedure, ask
from heliograph.core.methods import GET_MEMORY
from heliograph.core.shell import Shell
from heliograph.core.watching import why_lost
from heliograph.graph.arguments import counted
from heliograph.notebook.elements import Markup, bar, card, facts, folded, heading, note, table, warning
from heliograph_proto.devices import DeviceInfo
from heliograph_proto.errors import HeliographError
from heliograph_proto.types import TensorType, size_text

if TYPE_CHECKING:
    from collections.abc import Mapping

    from heliograph._base.device import DeviceBase
    from heliograph._base.plan import PlanBase
    from heliograph._base.session import SessionBase

T = TypeVar("T")
#: The longest time that one view waits for the server.
LOOK_SECONDS = 1.0
#: Limits above this are none.
_NO_LIMIT = 2**63 - 1


def look(shell: Shell, procedure: Procedure[T], what: str) -> T | Markup:
    """Return the answer of the server, or a line that says why there is none."""
    if shell.core.lost is not None or not shell.can_wait:
        procedure.close()
        why = shell.core.lost
        return warning(f"the session has ended: {why.message}") if why else note("")
    try:
        return shell.drive(procedure, LOOK_SECONDS, what)  # type: ignore[attr-defined, no-any-return]
    except HeliographError as error:
        return warning(f"{error.message}. {error.advice}".rstrip(". ") + ".")


# Sessions


def session_view(session: SessionBase) -> str:
    """A session: the daemon, the transport, the devices and what was sent. Asks nothing."""
    shell, info = session._shell, session.info
    lost = shell.core.lost
    return card(
        f"Session at {session.address}",
        *([warning(f"closed: {lost.message}")] if lost is not None else []),
        facts(
            [
                ("server", info.server),
                ("transport", _transport(session)),
                *_work(session),
            ]
        ),
        heading("devices"),
        table(("name", "type", "backend", "description"), [_device_row(shell, one) for one in info.devices]),
    )


def _transport(session: SessionBase) -> str:
    if session._shell.address.scheme == "local":
        return "none: it computes in this process"
    commands = "a socket of their own" if session.command_socket else "gRPC"
    return f"commands by {commands}, tensors by {'shared memory' if session.shared_memory else 'connections'}"


def _work(session: SessionBase) -> list[tuple[str, object]]:
    if session.closed:
        return []
    found = session.statistics()
    pending = found.sent_commands - found.completed_commands
    traffic = found.traffic
    return [
        ("commands", f"{found.sent_commands:,} sent, {pending:,} not done"),
        ("tensors", f"{size_text(traffic.written_bytes)} written, {size_text(traffic.read_bytes)} read"),
    ]


def _device_row(shell: Shell, one: DeviceInfo) -> tuple[object, ...]:
    lost = why_lost(shell.info.devices, one.name)
    said = f"lost: {lost}" if lost else one.description
    return one.name, one.type.name.lower(), one.backend, said


# Devices


def device_view(device: DeviceBase) -> str:
    """A device, with its free memory if the server says it at once."""
    info = device._info
    kinds = [
        (
            one.name,
            one.role.name.lower(),
            f"{one.alignment_bytes:,}",
            "no limit" if one.max_size_bytes >= _NO_LIMIT else size_text(one.max_size_bytes),
            "yes" if one.is_host else "no",
        )
        for one in info.buffer_types
    ]
    features = [*info.features.items(), *((name, f"missing: {why}") for name, why in info.missing.items())]
    memory, said = _memory(device)
    return card(
        f"Device {info.name}: {info.description}",
        *([warning(f"lost: {device.lost}")] if device.lost else []),
        facts(
            [
                ("type", info.type.name.lower()),
                ("backend", info.backend),
                ("location", info.id),
                ("memory", memory),
            ]
        ),
        said,
        folded("buffer types", table(("name", "role", "alignment", "largest", "host memory"), kinds)),
        folded(counted(len(features), "feature"), table(("feature", "value"), features)),
    )


def _memory(device: DeviceBase) -> tuple[Markup | None, Markup]:
    """The memory as a bar, and a line if it is not known."""
    if device.lost:
        return None, Markup("")
    found = look(device._shell, ask(GET_MEMORY, device.name), f"asking for the memory of {device.name}")
    if isinstance(found, Markup):
        return None, found
    if not found.total_bytes:
        return None, Markup("")
    used = found.total_bytes - found.free_bytes
    label = f"{size_text(used)} of {size_text(found.total_bytes)} used"
    return bar(used / found.total_bytes, label), Markup("")


# Plans


def plan_view(plan: PlanBase) -> str:
    """A plan: its ports, and the explanation if the server gives it at once."""
    from heliograph.explain.notebook_view import explanation_parts

    head = repr(plan)[1:-1]
    ports = [
        _ports("inputs", plan.inputs),
        _ports("outputs", plan.outputs),
        _ports("variables", {one.port.name: one.port.type for one in plan._spec.info.variables}),
    ]
    if plan.freed:
        return card(head, warning("the plan was freed"), *ports)
    found = look(plan._shell, plan._explaining(), f"explaining {plan!r}")
    parts = [found] if isinstance(found, Markup) else [note(found.summary()), *explanation_parts(found)]
    return card(head, *ports, *parts)


def _ports(title: str, types: Mapping[str, TensorType]) -> Markup:
    rows = [(name, one.dtype.name, one.shape, size_text(one.nbytes)) for name, one in types.items()]
    shown = table(("name", "type", "shape", "size"), rows)
    return Markup(heading(title) + shown if rows else "")
