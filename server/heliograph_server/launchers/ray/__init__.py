"""Ray as the engine of a pool: it places a supervisor on each node, and replaces lost ones.

    registry   a detached actor named NAME: the pool's specification and its members' addresses
    NAME/0...  detached actors, restarted without limit, each in a bundle of a placement group
               (STRICT_SPREAD) that puts no two on one node. Each runs `heliograph serve` as a
               child that dies with it

Ray runs in separate processes: in the actors, and in an *agent* (`agent`), which the command line
and the `ray:` source of a head use. Ray ends processes that lose their cluster, so a head survives
that. Only `actors`, `cluster` and `agent` import Ray.
"""

from __future__ import annotations
