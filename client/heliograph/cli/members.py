"""How `heliograph doctor` looks at the pool of a head: its members, the ways between them, and whether this
client reaches them itself, which weights then do not go through the head for."""

from __future__ import annotations

import time
from concurrent.futures import ThreadPoolExecutor

import heliograph as hg
from heliograph.cli.measurements import MemberSeen, PoolSeen
from heliograph_proto.membership import MemberInfo, MemberState

#: How long this client may take to reach a member, and how many it tries at the same time.
REACH_SECONDS = 3.0
AT_ONCE = 8


def see_pool(session: hg.Session, is_here: bool, timeout: float) -> PoolSeen | None:
    """What the head of a pool has behind it; None for other servers. `is_here`: the head is this process.

    Raises what asking a server may.
    """
    if not session.info.is_head:
        return None
    members = session.members(timeout)
    try:
        ways, why = session.ways(timeout), ""
    except hg.UnsupportedError as error:
        ways, why = (), error.message

    def see(member: MemberInfo) -> MemberSeen:
        return _seen(session, member, is_here, min(timeout, REACH_SECONDS))

    with ThreadPoolExecutor(AT_ONCE) as threads:
        seen = tuple(threads.map(see, members))
    return PoolSeen(seen, ways, is_here, why)


def _seen(session: hg.Session, member: MemberInfo, is_here: bool, timeout: float) -> MemberSeen:
    told = (
        member.name,
        member.address,
        member.state.name.lower(),
        member.why,
        member.advice,
        member.devices,
        member.server,
    )
    if is_here or member.state is not MemberState.READY:
        return MemberSeen(*told)
    try:
        return MemberSeen(*told, *_reached(session, member.address, timeout))
    except hg.HeliographError as error:
        return MemberSeen(*told, reached=False, why_not_reached=error.message)


def _reached(session: hg.Session, address: str, timeout: float) -> tuple[bool, str, float]:
    """Whether this client finds the member itself where the head does; if not, why; and the time of an empty
    command. Raises what connecting does."""
    with hg.connect(address, timeout=timeout, progress=None, shared_memory=False) as member:
        # Such as one on this host, where the head says 127.0.0.1.
        if session.info.daemons and member.info.incarnation not in session.info.daemons:
            return False, "another daemon answers there", 0.0
        member.synchronize(timeout)
        begun = time.perf_counter()
        member.synchronize(timeout)
        return True, "", time.perf_counter() - begun
