"""The contract between client and server, and the pure modules that give its messages meaning.

`v1/` holds the .proto files and the code generated from them. The other modules know no socket,
clock or device: dtypes, the op table and its shape inference, graphs, errors, addresses, and the
conversion between messages and the frozen dataclasses that live inside client and server.
"""

#: The versions of the contract that this package speaks.
VERSION_MIN = 1
VERSION_MAX = 1

#: A server that exchanges values with others, for graphs that run on several.
EXCHANGE = "exchange"
SHARED_MEMORY = "shared-memory"
#: A server that takes contents by tickets, and one that has devices of such servers.
TICKETS = "tickets"
DIRECT_WEIGHTS = "direct-weights"
#: A client that is told of changes of devices.
WATCH = "watch"
#: The features that this package knows and that a peer may lack, as the handshake names them.
FEATURES = (
    DIRECT_WEIGHTS,
    EXCHANGE,
    SHARED_MEMORY,
    TICKETS,
    WATCH,
)

#: The version of the program, client and server alike.
__version__ = "0.1.0"
