"""Many answers of one model at a time: continuous batching.

    HTTP (http/) ──▸ Server (engine.py) ──▸ Scheduler (scheduler.py): what to do next, pure
                                       │         └──▸ Pages (pages.py): who reads which page, pure
                                       ├──▸ StepInputs (inputs.py): the arrays of each step, pure
                                       └──▸ ServedPlans (plans.py): compiled when first needed
                                                 └──▸ PagedDecoder (graphs.py): their graphs
    Speculator (../speculating.py): proposes tokens of an answer that is alone (drafting.py)

A *page* is a part of the cache that has the keys and values of 32 tokens. Answers that begin with
the same tokens share pages. A loop of the decoding plan ends when a request joins, and goes on when
one leaves.
"""

from heliograph.llm.serving.engine import Server
from heliograph.llm.serving.scheduler import Bounds, QueueFullError

__all__ = ["Bounds", "QueueFullError", "Server"]
