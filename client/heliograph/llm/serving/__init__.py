"""Many answers of one model at a time: continuous batching.

    HTTP (http/) ──▸ Server (engine.py) ──▸ Scheduler (scheduler.py): what to do next, pure
                                       │         └──▸ Pages (pages.py): who reads which page, pure
                                       └──▸ PagedDecoder (graphs.py): the graphs of each step

A *page* is a part of the cache that has the keys and values of 32 tokens. Answers that begin with
the same tokens share pages. Requests join and leave between two loops of the decoding plan.
"""

from heliograph.llm.serving.engine import Server
from heliograph.llm.serving.scheduler import Bounds, QueueFullError

__all__ = ["Bounds", "QueueFullError", "Server"]
