"""The Heliograph daemon. Each folder may import those above it, and says where it does not.

config      settings, from a file, the environment and the command line
scheduler   ggml's scheduler: which device runs which node, pure
resources   what sessions share and use up: devices' time and memory, quotas, handles
exchange    values that travel between daemons while a plan runs
weights     contents by digest, in devices' memory and on disk
plans       compiled plans, on one device, several devices or several hosts
session     one client's state: a pure protocol core, and what drives it against devices
compile     from a graph of a client to a plan
runtime     the host: devices and the sessions that share them
auth        tokens, certificates, and the check of every call
telemetry   metrics, logs and traces
links       connections to other daemons
pool        other daemons' devices as ours
inprocess   `local:`, the server inside a client's process
rpc         the gRPC services
launchers   what starts and restarts daemons: Ray, or a supervisor
daemon      `heliograph serve`, from start to stop
commands    the commands of `heliograph` that need the server or the backends
"""
