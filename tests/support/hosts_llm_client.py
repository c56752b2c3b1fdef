"""What a client of a pool's head asks a language model: `python hosts_llm_client.py URL MODEL DEVICE...`.

It serves the model on the first device, on the first two, and on all, and tells of each, as a line
of JSON, the answers to the same requests: alone, with 31 others, and after a prompt that begins
alike. With "lose" on standard input in between, an answer is under way while a host is lost.
"""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Sequence
from typing import Any

import numpy as np
from hosts_client import START_SECONDS, tell

import heliograph as hg
from heliograph.llm.serving import Bounds, Server
from heliograph.llm.serving.answering import Answering

REQUESTS, SLOTS, LAYERS, TOKENS = 4, 32, 3, 10


def prompt(number: int) -> list[int]:
    count = 3 + 11 * (number % 7)
    return np.random.default_rng(number).integers(300, 600, count).tolist()


def options(number: int) -> dict[str, Any]:
    greedy = {"temperature": 0.0, "logprobs": True}
    return {"max_tokens": TOKENS, "seed": number, **(greedy if number % 2 else {"temperature": 0.9})}


async def read(made: Answering) -> list[Any]:
    async for _ in made:
        pass
    probabilities = [(one.token, one.logprob, *one.alternatives[:3]) for one in made.result.logprobs]
    return [made.result.tokens, probabilities]


async def asked(server: Server, numbers: Sequence[int]) -> list[Any]:
    return await asyncio.gather(*(read(server.submit(prompt(n), **options(n))) for n in numbers))


def pins(devices: Sequence[str]) -> dict[str, str]:
    """A layer, or several, for each."""
    return {f"layer{n}/*": devices[n * len(devices) // LAYERS] for n in range(LAYERS)}


async def same(session: hg.aio.Session, model: str, devices: Sequence[str]) -> None:
    placed: Any = {"devices": list(devices), "pins": pins(devices)}
    server = await Server.load(session, model, bounds=Bounds(SLOTS), **placed)
    try:
        alone = [(await asked(server, [number]))[0] for number in range(REQUESTS)]
        together = (await asked(server, range(SLOTS)))[:REQUESTS]
        tokens = prompt(6) + prompt(5)
        fresh = await read(server.submit(tokens, **options(1)))
        hit = server.submit([*tokens, 400], **options(1))
        found = await read(hit)
        reused = hit.result.reused_tokens
        await server.close()
        server = await Server.load(session, model, bounds=Bounds(SLOTS), **placed)
        cold = await read(server.submit([*tokens, 400], **options(1)))
        tell(
            {
                "alone": alone,
                "together": together,
                "fresh": fresh,
                "hit": found,
                "cold": cold,
                "reused": reused,
            }
        )
    finally:
        await server.close()


async def lose(session: hg.aio.Session, model: str, devices: Sequence[str]) -> None:
    """Two answers: the first is under way while a host is lost, the second waits for its slot."""
    placed: Any = {"devices": list(devices), "pins": pins(devices)}
    server = await Server.load(session, model, bounds=Bounds(1), context=4000, **placed)
    try:
        first = server.submit(prompt(1), max_tokens=3900, temperature=0.0)
        second = server.submit(prompt(2), **options(2))
        try:
            count = 0
            async for _ in first:
                count += 1
                if count == 3:
                    tell("under way")
            tell(["ended", ""])
        except hg.HeliographError as error:
            tell([type(error).__name__, error.message])
        tell(await asyncio.wait_for(read(second), START_SECONDS))
    finally:
        await server.close()


async def main(what: str, url: str, model: str, *devices: str) -> None:
    async with hg.aio.connect(url, timeout=START_SECONDS, progress=None) as session:
        watch = session.watch()
        async with asyncio.timeout(START_SECONDS):
            while not set(devices) <= {one.name for one in session.devices}:
                await anext(watch)
        watch.close()
        if what == "lose":
            await lose(session, model, devices)
        else:
            for count in range(1, len(devices) + 1):
                await same(session, model, devices[:count])


if __name__ == "__main__":
    asyncio.run(main(*sys.argv[1:]))
