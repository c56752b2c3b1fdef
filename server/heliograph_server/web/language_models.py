"""The requests of language models, as their servers (`heliograph llm-serve`) tell them in metrics.

These servers are processes of their own, clients of this daemon or of another one. Their addresses
are the operator's, and so is the token for them. A server is asked on a thread, once a second while
a page is open; one that does not answer delays no other.
"""

from __future__ import annotations

import json
import math
import re
import time
import urllib.request
from collections.abc import Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from http.client import HTTPException
from pathlib import Path
from typing import Any
from urllib.error import HTTPError

from heliograph_server.web.quantiles import quantile_of_bounds

#: The time between two questions, and the most time of an answer.
ASK_SECONDS, ANSWER_SECONDS = 1.0, 2.0
#: The longest answer.
MOST_BYTES = 2**20
_LINE = re.compile(r"^heliograph_llm_(\w+?)(?:\{([^}]*)\})? (\S+)$")

#: Figures by name and labels, as `pages{state="used"}`.
Figures = Mapping[str, float]


def parse(text: str) -> dict[str, float]:
    """The finite figures of a language model in Prometheus' text, without the prefix of their
    names."""
    found: dict[str, float] = {}
    for line in text.splitlines():
        if (match := _LINE.match(line)) is not None:
            name, labels, value = match.groups()
            try:
                figure = float(value)
            except ValueError:
                continue
            if math.isfinite(figure):
                found[f"{name}{{{labels}}}" if labels else name] = figure
    return found


def sum_of(figures: Figures, name: str) -> float:
    """The sum of a figure over its labels."""
    return sum(value for key, value in figures.items() if key == name or key.startswith(f"{name}{{"))


def row_of(name: str, now: Figures, before: Figures, seconds: float) -> dict[str, Any]:
    """The row of a model, with rates since the figures before."""

    def rate(*names: str) -> float:
        grown = sum(sum_of(now, one) - sum_of(before, one) for one in names)
        return round(max(0.0, grown) / max(seconds, 1e-3), 1)

    first = "first_token_seconds_bucket"
    bounds = [key for key in now if key.startswith(f"{first}{{") and _is_bound(_bound(key))]
    counts, early = [now[key] for key in bounds], [before.get(key, 0.0) for key in bounds]
    pages = sum_of(now, "pages")
    return {
        "name": name,
        "state": "ready" if "answers" in now else "loading",
        "answers": round(now.get("answers", 0)),
        "waiting": round(now.get("waiting", 0)),
        "requests": rate("requests_total"),
        "tokens": rate('tokens_total{kind="answer"}'),
        "first": round(1e6 * quantile_of_bounds(early, counts, [_bound(key) for key in bounds], 0.5)),
        "pages": round(now.get('pages{state="used"}', 0) / pages, 3) if pages else 0.0,
    }


def _bound(key: str) -> str:
    return key.partition('le="')[2].partition('"')[0]


def _is_bound(text: str) -> bool:
    try:
        return text == "+Inf" or math.isfinite(float(text))
    except ValueError:
        return False


@dataclass(slots=True)
class _Server:
    """A server, and its last two answers."""

    url: str
    asked_at: float = float("-inf")
    asking: Future[None] | None = None
    #: The name of its model; empty until it has told it.
    model: str = ""
    problem: str = "not asked yet"
    answers: list[tuple[float, Figures]] = field(default_factory=list)


class LanguageModelWatch:
    """Asks the servers of language models. Used by one thread at a time."""

    def __init__(self, urls: Sequence[str], token_file: str = "") -> None:
        self._servers = [_Server(url.rstrip("/")) for url in urls]
        self._token_file = token_file
        self._threads = ThreadPoolExecutor(max(1, min(len(urls), 8)), "heliograph-web-llm")

    def __repr__(self) -> str:
        return f"<LanguageModelWatch of {len(self._servers)} servers>"

    def rows(self, now: float) -> tuple[dict[str, Any], ...]:
        """The table as last answered; asks again if that is due. `now` is by `time.monotonic()`."""
        for one in self._servers:
            is_free = one.asking is None or one.asking.done()
            if is_free and now - one.asked_at >= ASK_SECONDS:
                one.asked_at = now
                one.asking = self._threads.submit(self._ask, one)
        return tuple(map(_row, self._servers))

    def _ask(self, server: _Server) -> None:
        try:
            if not server.model:
                told = json.loads(self._get(f"{server.url}/health"))
                server.model = str(told["model"])[:200]
            figures = parse(self._get(f"{server.url}/metrics"))
        except HTTPError as error:
            server.problem = f"refuses with status {error.code}"
        except (OSError, HTTPException, RecursionError, ValueError, KeyError, TypeError):
            server.problem, server.model = "does not answer", ""
        else:
            server.problem = ""
            server.answers = [*server.answers[-1:], (time.monotonic(), figures)]

    def _get(self, url: str) -> str:
        """Raises OSError, HTTPError, HTTPException, ValueError."""
        request = urllib.request.Request(url)
        if self._token_file:
            token = Path(self._token_file).read_text(encoding="utf-8").strip()
            request.add_unredirected_header("authorization", f"Bearer {token}")
        with urllib.request.urlopen(request, timeout=ANSWER_SECONDS) as answer:
            found: bytes = answer.read(MOST_BYTES)
            return found.decode("utf-8", "replace")

    def close(self) -> None:
        """End without waiting for answers."""
        self._threads.shutdown(wait=False, cancel_futures=True)


def _row(server: _Server) -> dict[str, Any]:
    shown = f"{server.model or 'a model'} at {server.url}"
    if server.problem or not server.answers:
        return {**row_of(shown, {}, {}, 1.0), "state": server.problem or "loading"}
    (then, before), (now, figures) = server.answers[0], server.answers[-1]
    return row_of(shown, figures, before, now - then)
