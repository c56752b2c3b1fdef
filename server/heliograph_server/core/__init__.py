"""Sessions, their protocol, and their work on devices. `runtime` is the public surface.

In the order of a command: `arrival` (what it means), `ordering` (who waits for whom), `protocol` (the
pure core that ties these together), `session` (the core, driven against devices), `work` and
`execution` (the work itself), `occupancy` (when it may be done at once, and, by `fair`, whose turn it is).
Beside them `handles` and `tasks` (the nouns), `transfers`, `bulk`, `downloads`, `staging` (bytes on their own
road), `compiling`, `deadlines`, `tenants` (what each may have), and `host` (devices and sessions).
"""
