"""Ray as the engine of a pool: it places a supervisor on each node, and starts it anew wherever it was lost.

    registry   a detached actor named NAME: what the pool is to be, and where its members listen
    NAME/0...  detached actors, restarted without limit, each in a bundle of a placement group (STRICT_SPREAD)
               that puts no two on one node. Each runs `heliograph serve` as a child that dies with it

Ray lives in processes of its own: in the actors, and in an *agent* (`agent`), which the command line and the
`ray:` source of a head ask. A head whose cluster is gone so goes on; Ray ends processes that lose it.
`actors`, `cluster` and `agent` alone import Ray.
"""

from __future__ import annotations
