"""The Heliograph daemon. Each folder may import those above it; its docstring has the exceptions.

config      settings, from a file, the environment and the command line
scheduler   ggml's scheduler: which device runs which node, pure
resources   shared resources of sessions: device time and memory, quotas, handles
exchange    values that travel between daemons while a plan runs
weights     contents by digest, in device memory and on disk
plans       compiled plans, on one device, several devices or several hosts
session     the state of one client: a pure protocol core, and its driver
compile     the compilation of a graph into a plan
runtime     the host: devices and the sessions that share them
auth        tokens, certificates, and the check of every call
telemetry   metrics, logs and traces
links       connections to other daemons
pool        the devices of other daemons as local ones
inprocess   `local:`, the server inside a client's process
rpc         the gRPC services
launchers   engines that start and restart daemons: Ray, or a supervisor
daemon      `heliograph serve`, from start to stop
commands    the commands of `heliograph` that need the server or the backends
"""
