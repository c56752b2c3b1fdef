"""Random runs, checkpoints and losses: results are those of a session that loses nothing."""

from __future__ import annotations

import random
from typing import Any

import numpy as np
import pytest
from losing import NAMES, SECONDS, TRANSPORTS, Array, Losable, inputs, losable, reading, same, summing

import heliograph as hg

ROUNDS = 12


def expected_results(what: list[tuple[str, int]], given: list[Array]) -> list[Array]:
    """Of the same runs on one device that nobody loses."""
    with hg.connect("local:#fake") as session:
        writer, reader = session.compile(summing()), session.compile(reading())
        return [result_of(writer, reader, kind, given[number], "run")["y"] for kind, number in what]


def result_of(writer: hg.Plan, reader: hg.Plan, kind: str, array: Array, method: str) -> dict[str, Array]:
    """What a run gives, or its future."""
    time = {} if method == "run" else {"timeout": SECONDS}
    if kind == "write":
        return getattr(writer, method)({"x": array}, **time)  # type: ignore[no-any-return]
    return getattr(reader, method)({"k": array[0]}, **time)  # type: ignore[no-any-return]


@pytest.mark.parametrize("transport", TRANSPORTS)
def test_random_runs_with_random_losses_give_the_same_bits(
    transport: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    seed = random.randrange(2**32)
    print("seed", seed)
    chance = random.Random(seed)
    for number in range(ROUNDS):
        with losable(transport, monkeypatch) as pool:
            given = inputs(30, seed=number)
            what = [(chance.choice(["write", "write", "read"]), place) for place in range(30)]
            expected = expected_results(what, given)
            found = results_with_losses(pool, chance, what, given)
        for place, (one, other) in enumerate(zip(found, expected, strict=True)):
            assert same(one, other), f"seed {seed}, round {number}, run {place} of {what}"


def results_with_losses(
    pool: Losable, chance: random.Random, what: list[tuple[str, int]], given: list[Array]
) -> list[Array]:
    for name in chance.sample(NAMES, 2):
        pool.devices[name].script.lost_after = chance.randrange(40)
    with hg.connect(pool.url) as session:
        graphs = summing(), reading()
        writer, reader = (session.compile(one, list(NAMES), on_loss="rebuild") for one in graphs)
        writer.checkpoint(timeout=SECONDS)
        futures: list[hg.RunFuture] = []
        for kind, number in what:
            sent: Any = result_of(writer, reader, kind, given[number], "submit")
            futures.append(sent)
            if chance.random() < 0.2:
                chance.choice(futures).result()
            if chance.random() < 0.1:
                # What was not read before a checkpoint may not be repeated behind it.
                for one in futures:
                    one.result()
                chance.choice([writer, reader]).checkpoint(timeout=SECONDS)
        order = chance.sample(range(len(futures)), len(futures))
        for place in order:
            futures[place].result()
        return [np.asarray(one.result()["y"]) for one in futures]
