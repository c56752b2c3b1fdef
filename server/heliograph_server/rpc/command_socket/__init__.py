"""The command streams of clients on this host over unix sockets, as in `memory.proto`."""
