"""`heliograph health`: whether a daemon lives and takes sessions, by grpc.health.v1.

As a process it is answered by `heliograph._bootstrap` before anything else is loaded; this is for callers of
`main`.
"""

from __future__ import annotations

from heliograph._probe import add_arguments, run

__all__ = ["add_arguments", "run"]
