"""The exchange of one daemon: what `core/exchange.py` promises, without grpc.

ledger     who may have what, and what became of it (pure)
values     bytes on their way out, piece by piece, and how many of them may be held
counting   how much has gone by
landing    bytes on their way in, straight into their tensor
carrying   values that are taken to another daemon, its own and others'
foretold   what is asked for a run ahead
live       both ends together, thread-safe
near       the way between exchanges of one process
"""

from heliograph_server.core.exchanging.landing import Done, Landing, Peers, Puller, Pusher, Sink
from heliograph_server.core.exchanging.live import LiveExchange, LivePorts
from heliograph_server.core.exchanging.near import NearPuller
from heliograph_server.core.exchanging.values import SMALL_BYTES, Value

__all__ = [
    "SMALL_BYTES",
    "Done",
    "Landing",
    "LiveExchange",
    "LivePorts",
    "NearPuller",
    "Peers",
    "Puller",
    "Pusher",
    "Sink",
    "Value",
]
