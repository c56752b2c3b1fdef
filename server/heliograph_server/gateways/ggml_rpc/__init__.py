"""ggml's RPC protocol: a llama.cpp build uses the devices of the daemon as its own.

`wire` has the messages, `buffers` the data types and the addresses. `tracing` and `regions`
decide which bytes a graph reads and writes, `ops` has a rule for each op, and `graphs` makes our
graphs. `session` sends commands, `device` has the buffers and graphs of a connection, `connection`
answers its messages, and `server` has the listener.
"""
