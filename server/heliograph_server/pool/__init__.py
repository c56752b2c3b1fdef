"""Devices of other daemons behind the backend contract: compiled for here, computing there.

    Member ─ RemoteDevice ─ RemoteBufferType ─ RemoteBuffer     one session with a member;
                  │                                             its handles stand for our
              RemotePlan                                        tensors and plans

The code above this package does not depend on whether a device is remote.
"""

from heliograph_server.pool.backend import RemoteBackend, open_device
from heliograph_server.pool.member import Member
from heliograph_server.pool.pool import Pool, open_pool_of
from heliograph_server.pool.remote.device import RemoteDevice

__all__ = ["Member", "Pool", "RemoteBackend", "RemoteDevice", "open_device", "open_pool_of"]
