"""`local:`: the server inside a client's process, as a transport of the client.

Imports `runtime` and `pool`.
"""
