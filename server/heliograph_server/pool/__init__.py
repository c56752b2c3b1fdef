"""Devices of other daemons behind the backend contract: what compiles and runs here, computes there.

    Member ─ RemoteDevice ─ RemoteBufferType ─ RemoteBuffer     one session with a member;
                  │                                             handles of its tensors and plans
              RemotePlan                                        stand for ours

Nothing above this package knows that a device is remote.
"""

from heliograph_server.pool.backend import RemoteBackend, open_device
from heliograph_server.pool.member import Member
from heliograph_server.pool.pool import Pool, open_pool_of
from heliograph_server.pool.remote.device import RemoteDevice

__all__ = ["Member", "Pool", "RemoteBackend", "RemoteDevice", "open_device", "open_pool_of"]
