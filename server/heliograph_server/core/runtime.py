"""The public surface of the core: what a daemon, or a client that runs in process, works with.

    host = Host(open_registry())
    info = host.open_session("me")
    session = host.session(info.session)
    session.attach(on_batch)
    session.submit([Command(...), ...])
    session.close(); host.close()

Imports no grpc, no event loop and no numba.
"""

from heliograph_server.core.bulk import Upload
from heliograph_server.core.compile_request import CompileRequest
from heliograph_server.core.downloads import Download
from heliograph_server.core.host import Host, HostStatistics
from heliograph_server.core.session import Session
from heliograph_server.core.session_seen import SessionStatistics
from heliograph_server.core.sizing import EstimateRequest, ReserveRequest

__all__ = [
    "CompileRequest",
    "Download",
    "EstimateRequest",
    "Host",
    "HostStatistics",
    "ReserveRequest",
    "Session",
    "SessionStatistics",
    "Upload",
]
