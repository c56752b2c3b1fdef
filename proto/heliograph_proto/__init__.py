"""The contract between client and server: its messages and the types they carry.

`v1/` holds the .proto files and the code generated from them. The other modules are pure (no
sockets, clocks or devices): dtypes, the op table and its shape inference, graphs, errors,
addresses, and the conversion between messages and the frozen dataclasses that client and server
use.
"""

#: The versions of the contract that this package speaks.
VERSION_MIN = 1
VERSION_MAX = 1

#: The server exchanges values with other servers, for graphs that run on several.
EXCHANGE = "exchange"
#: Loops of a graph on several such servers go from server to server.
EXCHANGED_LOOPS = "exchanged-loops"
SHARED_MEMORY = "shared-memory"
#: The server takes commands over a unix socket, from clients that it shares memory with.
COMMAND_SOCKET = "command-socket"
#: The server takes connections of a session beside gRPC's, over TCP.
DIRECT = "direct"
#: The server accepts contents by ticket.
TICKETS = "tickets"
#: The server has devices of servers that accept contents by ticket.
DIRECT_WEIGHTS = "direct-weights"
#: Pieces of transfers may be packed; and packed with zstd, where its library is installed.
PACKING = "packing"
ZSTD = "zstd"
#: A session may outlive a broken connection.
LEASE = "lease"
#: A session may be handed to another daemon.
MOVE = "move"
#: The client is a head, which takes its values from a server that drains.
HAND_OVER = "hand-over"
#: The client receives changes of devices.
WATCH = "watch"
#: The optional features that this package always supports, as the handshake names them; HAND_OVER
#: is one of servers and of heads.
FEATURES = (
    COMMAND_SOCKET,
    DIRECT,
    DIRECT_WEIGHTS,
    EXCHANGE,
    EXCHANGED_LOOPS,
    LEASE,
    MOVE,
    SHARED_MEMORY,
    TICKETS,
    WATCH,
)

#: The version of the program: client and server.
__version__ = "0.1.0"
