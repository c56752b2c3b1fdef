"""A client of a pool's head that serves a language model:
`python hosts_llm_client.py URL MODEL DEVICE...`.

It serves the model on the first device, on the first two, and on all, with the adapter that lies
beside it, and with proposals of the text so far. For each of these it prints, as a line of JSON, the
answers to the same requests: alone, with 31 others, and after a prompt that begins alike. With "lose"
in place of "same", an answer is under way while a host is lost.
"""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from hosts_client import START_SECONDS, tell

import heliograph as hg
from heliograph.llm.constraints import constraint_of
from heliograph.llm.language_model import Asked
from heliograph.llm.serving import Bounds, Server
from heliograph.llm.serving.answering import Answering
from heliograph.llm.speculating import LOOKUP

REQUESTS, SLOTS, LAYERS, TOKENS = 6, 32, 3, 10
ADAPTER = "adapter"


def prompt(number: int) -> list[int]:
    count = 3 + 11 * (number % 7)
    return np.random.default_rng(number).integers(300, 600, count).tolist()


def options(number: int) -> dict[str, Any]:
    """Likely tokens, sampled ones, some with an adapter, and some that follow a grammar."""
    greedy = {"temperature": 0.0, "logprobs": True}
    found = {"max_tokens": TOKENS, "seed": number, **(greedy if number % 2 else {"temperature": 0.9})}
    if number % 3 == 2:
        found["adapter"] = ADAPTER
    if number % 5 == 4:
        found["regex"] = "[a-f]{2,5}-[0-9]{1,9}"
    return found


async def read(made: Answering) -> list[Any]:
    async for _ in made:
        pass
    probabilities = [(one.token, one.logprob, *one.alternatives[:3]) for one in made.result.logprobs]
    return [made.result.tokens, probabilities]


async def answered(server: Server, number: int) -> list[Any]:
    """An answer, with its grammar if it follows one."""
    given = options(number)
    asked = Asked(prompt(number), constraint_of(None, given.get("regex"), None))
    [matcher] = await server.following.begin(asked, 1)
    return await read(server.submit(asked, matcher=matcher, **given))


async def asked(server: Server, numbers: Sequence[int]) -> list[Any]:
    return await asyncio.gather(*(answered(server, number) for number in numbers))


async def loaded(session: hg.aio.Session, model: str, devices: Sequence[str]) -> Server:
    placed: Any = {"devices": list(devices), "pins": pins(devices)}
    path = Path(model).with_name(f"{ADAPTER}.gguf")
    return await Server.load(session, model, bounds=Bounds(SLOTS), adapters=[path], draft=LOOKUP, **placed)


def pins(devices: Sequence[str]) -> dict[str, str]:
    """A layer, or several, for each."""
    return {f"layer{n}/*": devices[n * len(devices) // LAYERS] for n in range(LAYERS)}


async def same(session: hg.aio.Session, model: str, devices: Sequence[str]) -> None:
    server = await loaded(session, model, devices)
    try:
        alone = [(await asked(server, [number]))[0] for number in range(REQUESTS)]
        together = (await asked(server, range(SLOTS)))[:REQUESTS]
        tokens = prompt(6) + prompt(5)
        fresh = await read(server.submit(tokens, **options(1)))
        hit = server.submit([*tokens, 400], **options(1))
        found = await read(hit)
        reused = hit.result.reused_tokens
        await server.close()
        server = await loaded(session, model, devices)
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
        first = server.submit(prompt(1), max_tokens=1000, temperature=0.0)
        second = server.submit(prompt(2), **options(1))
        count = 0
        async for _ in first:
            count += 1
            if count == 3:
                tell("under way")
        tokens, _ = await asyncio.wait_for(read(second), START_SECONDS)
        again = server.submit(prompt(1), max_tokens=1000, temperature=0.0)
        tell([first.result.tokens == (await read(again))[0], tokens])
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
