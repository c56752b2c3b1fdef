"""The contract between client and server, and the pure modules that give its messages meaning.

`v1/` holds the .proto files and the code generated from them. The other modules know no socket,
clock or device: dtypes, the op table and its shape inference, graphs, errors, addresses, and the
conversion between messages and the frozen dataclasses that live inside client and server.
"""

#: The versions of the contract that this package speaks.
VERSION_MIN = 1
VERSION_MAX = 1

EXCHANGE = "exchange"
#: A server whose clients may follow what its log has of their sessions.
LOG = "log"
SHARED_MEMORY = "shared-memory"
STATISTICS = "statistics"
#: A server that takes contents by tickets, and one that has devices of such servers.
TICKETS = "tickets"
DIRECT_WEIGHTS = "direct-weights"
WATCH = "watch"
#: A server that tells of the ways between the members of its pool.
WAYS = "ways"
#: The optional features that this package knows, as the handshake names them.
FEATURES = (
    "blake3",
    DIRECT_WEIGHTS,
    EXCHANGE,
    "fusion",
    LOG,
    "loops",
    SHARED_MEMORY,
    STATISTICS,
    "taps",
    TICKETS,
    WATCH,
    WAYS,
)

#: The version of the program, client and server alike.
__version__ = "0.1.0"
