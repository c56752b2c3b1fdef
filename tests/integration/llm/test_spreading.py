"""Models over several members of a pool, none of which has room for all of one."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from gguf_files import write_model
from pool_daemons import Daemon, daemons, head_of, wait_for_devices

import heliograph as hg
from heliograph.cli import main
from heliograph.llm.serving import Bounds, Server

#: Weights of 5.6 MiB, and 1.6 MiB of keys and values: more than one member has.
SIZES: dict[str, Any] = {
    "width": 256, "layers": 6, "heads": 4, "kv_heads": 2, "row": 64, "hidden": 704, "context": 512,
}  # fmt: skip
MEMORY = "5MiB"
MEMBERS = ["m0/cpu0", "m1/cpu0"]
PROMPT = "The daemon serves graphs to many clients. " * 8


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Split into files, as large models are."""
    folder = tmp_path_factory.mktemp("models")
    return write_model(folder / "wide.gguf", "llama", "q8_0", part_tensors=20, **SIZES)


@pytest.fixture(scope="module")
def members(model: Path) -> Iterator[list[Daemon]]:
    with daemons(2, "--device", f"cpu:threads=1,memory={MEMORY}") as made:
        yield made


@pytest.fixture(scope="module")
def head(members: list[Daemon]) -> Iterator[Daemon]:
    with head_of(*members) as made:
        yield made


@pytest.fixture
def pool(head: Daemon) -> Iterator[hg.Session]:
    with hg.connect(head.url, progress=None) as session:
        wait_for_devices(session, "cpu0", *MEMBERS)
        yield session


def answers(llm: hg.llm.LanguageModel) -> list[list[int]]:
    asked: list[dict[str, Any]] = [{"temperature": 0}, {"seed": 1}, {"seed": 2, "top_k": 5}]
    return [llm.generate(PROMPT, max_tokens=12, **one).result().tokens for one in asked]


@pytest.fixture(scope="module")
def expected(model: Path) -> list[list[int]]:
    with hg.connect("local:") as session:
        return answers(hg.llm.load(session, model))


def test_a_model_that_fits_no_member_has_the_answers_of_one_host(
    pool: hg.Session, model: Path, expected: list[list[int]]
) -> None:
    llm = hg.llm.load(pool, model, devices=MEMBERS)
    assert answers(llm) == expected
    for plan in llm.plans:
        used = {one.name: one for one in plan.explain().devices}
        assert all(used[name].weights_bytes and used[name].variables_bytes for name in MEMBERS)


def test_all_plans_of_a_model_find_its_weights_where_the_first_one_put_them(
    pool: hg.Session, model: Path
) -> None:
    before = {name: pool.device(name).memory().free_bytes for name in MEMBERS}
    llm = hg.llm.load(pool, model, devices=MEMBERS)
    answers(llm)
    taken = sum(before[name] - pool.device(name).memory().free_bytes for name in MEMBERS)
    shares = [one.explain().devices for one in llm.plans]
    runs = sum(one.compute_bytes for plan in llm.plans for one in plan.explain().devices)
    lasting = max(sum(one.weights_bytes + one.variables_bytes for one in devices) for devices in shares)
    print(f"taken {taken:,}, weights and cache {lasting:,}, runs {runs:,}")
    # A layer on both members would take an eighth more.
    assert taken < lasting * 1.06 + 2.5 * runs
    for place in range(len(MEMBERS)):
        homes = [{one.name: one.variables_bytes for one in devices} for devices in shares]
        assert len({one[MEMBERS[place]] for one in homes}) == 1


def test_a_member_alone_says_what_the_model_needs_and_two_take_it_then(
    pool: hg.Session, model: Path, expected: list[list[int]]
) -> None:
    with pytest.raises(hg.OutOfMemoryError) as caught:
        hg.llm.load(pool, model, devices=MEMBERS[:1])
    text = caught.value.message
    assert "the model does not fit: it needs " in text and "for weights" in text
    assert "for keys and values" in text and "m0/cpu0 has 5,2" in text and "too few" in text
    assert "name more devices" in caught.value.advice
    # The weights that came to the first one do not stand in the way.
    assert answers(hg.llm.load(pool, model, devices=MEMBERS)) == expected


def test_many_answers_at_a_time_over_two_members_are_those_of_one(
    head: Daemon, model: Path, expected: list[list[int]]
) -> None:
    async def scenario() -> None:
        async with hg.aio.connect(head.url, progress=None) as session:
            wanted = {"devices": MEMBERS}
            server = await Server.load(session, model, bounds=Bounds(2), context=256, **wanted)  # type: ignore[arg-type]
            try:
                tokens = server.model.tokenizer.encode(PROMPT)
                asked: list[dict[str, Any]] = [{"temperature": 0}, {"seed": 1}, {"seed": 2, "top_k": 5}]
                made = [server.submit(tokens, max_tokens=12, **one) for one in asked]

                async def read(one: Any) -> list[int]:
                    async for _ in one:
                        pass
                    found: list[int] = one.result.tokens
                    return found

                assert await asyncio.gather(*map(read, made)) == expected
            finally:
                await server.close()

    asyncio.run(scenario())


def test_an_answer_ends_with_a_lost_member_and_the_next_one_needs_it_no_more(
    model: Path, expected: list[list[int]]
) -> None:
    with daemons(2) as made, head_of(*made) as one, hg.connect(one.url, progress=None) as session:
        wait_for_devices(session, "cpu0", *MEMBERS)
        pins = {"layer[0-2]/*": MEMBERS[0], "layer[3-5]/*": MEMBERS[1]}
        llm = hg.llm.load(session, model, devices=MEMBERS, pins=pins)
        answer = llm.generate(PROMPT, temperature=0)
        next(answer)
        made[1].kill()
        with pytest.raises(hg.MemberLostError, match="m1"):
            answer.result()
        assert answers(llm) == expected
        assert {node.device for node in llm.plans[0].explain().nodes} == {MEMBERS[0]}


def test_answers_of_a_server_go_on_without_a_member_that_is_lost(
    model: Path, expected: list[list[int]]
) -> None:
    asked: list[dict[str, Any]] = [{"temperature": 0}, {"seed": 1}, {"seed": 2, "top_k": 5}]

    async def scenario(member: Daemon, url: str) -> None:
        async with hg.aio.connect(url, progress=None) as session:
            pins: Any = {"layer[0-2]/*": MEMBERS[0], "layer[3-5]/*": MEMBERS[1]}
            server = await Server.load(
                session, model, bounds=Bounds(2), context=256, devices=MEMBERS, pins=pins
            )
            tokens = server.model.tokenizer.encode(PROMPT)
            # The third one waits.
            made = [server.submit(tokens, max_tokens=60, **one) for one in asked]
            deltas = [aiter(one) for one in made]

            async def read(left: Any) -> None:
                async for _ in left:
                    pass

            await anext(deltas[0])
            await asyncio.to_thread(member.kill)
            await asyncio.gather(*map(read, deltas))
            found = [one.result.tokens for one in made]
            assert [one[:12] for one in found] == expected
            assert not server.is_reconnecting
            await server.close()

    with daemons(2) as made, head_of(*made) as one:
        with hg.connect(one.url, progress=None) as session:
            wait_for_devices(session, "cpu0", *MEMBERS)
        asyncio.run(asyncio.wait_for(scenario(made[1], one.url), 60))


def test_an_answer_that_waits_ends_where_the_connection_follows_the_lost_member(model: Path) -> None:
    async def scenario(member: Daemon, url: str) -> None:
        async with hg.aio.connect(url, progress=None) as session:
            wanted: Any = {"devices": MEMBERS[:1]}
            server = await Server.load(session, model, bounds=Bounds(1), context=256, **wanted)
            first, second = (server.submit([300, 301], temperature=0) for _ in range(2))
            deltas = aiter(first)
            await anext(deltas)
            member.kill()
            with pytest.raises(hg.MemberLostError, match="m0"):
                async for _ in deltas:
                    pass
            # The server frees its plans meanwhile.
            await session.close()
            with pytest.raises((hg.ConnectionError, hg.MemberLostError)):
                await anext(aiter(second))
            await server.close()

    with daemons(1) as made, head_of(*made) as one:
        with hg.connect(one.url, progress=None) as session:
            wait_for_devices(session, "cpu0", *MEMBERS[:1])
        asyncio.run(asyncio.wait_for(scenario(made[0], one.url), 60))


def test_generate_spreads_a_model_over_every_device(
    pool: hg.Session, head: Daemon, model: Path, capsys: pytest.CaptureFixture[str], expected: list[list[int]]
) -> None:
    asked = ["generate", str(model), "-p", PROMPT, "-n", "12", "--temperature", "0", "--json"]
    for devices in ([",".join(MEMBERS)], ["all"]):
        limits = ["--memory", "cpu0=64KiB"] if devices == ["all"] else []
        assert main([*asked, "--server", head.url, "--devices", *devices, *limits]) == 0
        assert json.loads(capsys.readouterr().out)["tokens"] == expected[0]


def test_an_empty_name_of_a_device_is_refused(
    head: Daemon, model: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    arguments = ["generate", str(model), "-p", "x", "--server", head.url, "--devices", "m0/cpu0,"]
    assert main(arguments) == 1
    assert "has an empty name" in capsys.readouterr().err
