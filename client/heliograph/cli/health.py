"""`heliograph health`: check a daemon by grpc.health.v1.

In a process, `heliograph._bootstrap` runs it before anything else is loaded; this module is for
callers of `main`.
"""

from __future__ import annotations

from heliograph._probe import add_arguments, run

__all__ = ["add_arguments", "run"]
