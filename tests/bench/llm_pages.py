"""Decoding steps over pages, beside the same steps over slots of a whole context.

The model is that of `llm_serving`. Tables have the least sizes that hold the keys.
"""

from __future__ import annotations

import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
from figures import Figure, paired_medians
from llm_serving import model
from slots import decode

import heliograph as hg
from heliograph.llm.current_session import CurrentSession
from heliograph.llm.files.weights import open_file
from heliograph.llm.graphs import CARRIES
from heliograph.llm.loading import Loading, engine_of
from heliograph.llm.sampling import ENDS, Form
from heliograph.llm.serving.graphs import PagedDecoder
from heliograph.llm.serving.pages import PAGE, Pages, pages_of
from heliograph.llm.serving.scheduler import table_sizes

CONTEXT, STEPS = 2048, 4
#: The most that a step over pages may take of one over slots, in time of processors.
BAR = 1.03
ROUNDS = 24


def figures() -> Iterator[Figure]:
    """Milliseconds of processors for a step, at the beginning of a context and at its end."""
    with tempfile.TemporaryDirectory() as folder, hg.connect("local:") as session:
        path = model(Path(folder) / "model.gguf", CONTEXT)
        engine: Any = engine_of(CurrentSession(session), open_file(path), Loading(CONTEXT))
        for rows in (1, 8, 32):
            for name, position in (("short", 100), ("long", CONTEXT - 2 * STEPS)):
                slots = _steps(session, decode(engine.decoder, rows, Form(1)), rows, position, 0)
                pages = next(n for n in table_sizes(pages_of(CONTEXT)) if n * PAGE > position + STEPS)
                decoder = engine.decoder
                cache = replace(decoder.cache, name=f"pages{rows * pages}")
                paged = PagedDecoder(decoder.config, decoder.weights, cache, rows * pages)
                paging = _steps(session, paged.decode(rows, pages, Form(1)), rows, position, pages)
                ours, theirs = paired_medians(paging, slots, ROUNDS, 1)
                yield Figure(f"llm-pages/{name}-{rows}", ours * 1e3, theirs * 1e3, BAR, "ms", "slots")


def tables(rows: int, pages: int) -> np.ndarray[Any, Any]:
    """Return the pages of answers that have full tables, half of them taken by their growth in
    turns."""
    pool = Pages(rows * pages)
    made = [pool.open((str(row), ""), range(pages * PAGE // 2)) for row in range(rows)]
    for count in range(pages):
        for table in made:
            pool.grow(table, (count + 1) * PAGE)
    return np.array([table.numbers for table in made], np.int32)


def _steps(
    session: hg.Session, graph: hg.Graph, rows: int, position: int, pages: int
) -> Callable[[int], list[float]]:
    """Return a call that measures steps of a plan, in loops of STEPS."""
    plan = session.compile(graph)
    inputs = {
        "token": np.arange(300, 300 + rows, dtype=np.int32),
        "position": np.full(rows, position, np.int32),
        "ends": np.full((rows, ENDS), -1, np.int32),
    }
    if pages:
        inputs["table"] = tables(rows, pages)
        inputs["limit"] = np.full(rows, pages * PAGE, np.int32)

    def measure(runs: int) -> list[float]:
        found = []
        for _ in range(runs):
            begin = time.process_time()
            plan.loop(inputs, steps=STEPS, carry=CARRIES, fetch=()).result()
            found.append((time.process_time() - begin) / STEPS)
        return found

    measure(1)
    return measure
