"""The engine's work on a Ray cluster. Runs in the process of an agent, and converts Ray's
errors."""

from __future__ import annotations

import contextlib
import secrets
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, replace
from typing import Any

import ray
from ray.exceptions import GetTimeoutError, RayActorError, RayError, RaySystemError
from ray.util.placement_group import placement_group, placement_group_table, remove_placement_group
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from heliograph_proto.addresses import Address
from heliograph_proto.errors import (
    ComputeFailedError,
    ConfigurationError,
    DeadlineExceededError,
    HeliographError,
    UnavailableError,
)
from heliograph_server.launchers.ray.actors import NAMESPACE, MemberSupervisor, PoolRegistry, member_name
from heliograph_server.launchers.ray.address import check_reach
from heliograph_server.launchers.specification import (
    MemberStatus,
    PoolSpecification,
    PoolStatus,
    check_name,
    specification_from_json,
)

#: The timeout of a call to a running actor.
ANSWER_SECONDS = 10.0
#: The interval of checks while waiting.
LOOK_SECONDS = 0.25
#: The wait for nodes after which progress is reported.
TELL_SECONDS = 1.0
#: The number of failed starts in a row after which no further one is expected to succeed.
HOPELESS_STARTS = 3

Progress = Callable[[str], None]


# The cluster


def join(address: str) -> None:
    """Connect this process to a cluster.

    Raises UnavailableError, InvalidArgumentError, ConfigurationError.
    """
    check_reach(address)
    try:
        ray.init(address=address, namespace=NAMESPACE, log_to_driver=False, logging_level="error")
    except OSError as error:
        raise UnavailableError(
            f"no Ray cluster at {address!r}: {_first_line(error)}",
            advice="start one with `ray start --head`, or give its address: --address HOST:PORT on one of "
            "its nodes, --address ray://HOST:10001 from another host",
        ) from None
    except (RuntimeError, ValueError, RayError) as error:
        raise ConfigurationError(
            f"cannot join the Ray cluster at {address!r}: {_first_line(error)}",
            advice="this host must be a node of the cluster, with the same versions of Ray and Python; from "
            "another host, use --address ray://HOST:10001",
        ) from None


def _first_line(error: BaseException) -> str:
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return lines[0][:300] if lines else type(error).__name__


# Up


def up(pool: PoolSpecification, seconds: float, progress: Progress) -> PoolStatus:
    """Create the pool, or its missing parts, and wait until all members serve.

    A pool that this call created is removed again if that fails. Raises ConfigurationError (another
    pool of this name is up; too few nodes), ComputeFailedError (a daemon does not start),
    DeadlineExceededError.
    """
    deadline = time.monotonic() + seconds
    _check_reach(pool)
    if not pool.members and _find(pool.name) is None:
        pool = replace(pool, members=_nodes_with_room(pool))
    specification, is_ours = _registered(pool)
    try:
        _place(specification, deadline, progress)
        return _serving(specification, deadline, progress)
    except HeliographError:
        if is_ours:
            progress("removing the incomplete pool")
            down(pool.name, ANSWER_SECONDS, lambda text: None)
        raise


def _check_reach(pool: PoolSpecification) -> None:
    reachable = [node for node in _node_addresses() if not Address("grpc", host=node).is_loopback]
    if reachable and not pool.may_be_reached:
        raise ConfigurationError(
            f"members at {', '.join(sorted(set(reachable)))} could be reached from other hosts, in plain "
            "text",
            advice="give --serve --insecure if the network is trusted, and --serve --tokens FILE, a file on "
            "every node, if clients need tokens",
        )


def _node_addresses() -> list[str]:
    return [node["NodeManagerAddress"] for node in ray.nodes() if node["Alive"]]


def _nodes_with_room(pool: PoolSpecification) -> int:
    """The number of living nodes with room for a member. Raises ConfigurationError if there is
    none."""
    needs = _bundle(pool)
    alive = [node["Resources"] for node in ray.nodes() if node["Alive"]]
    found = sum(all(one.get(name, 0) >= amount for name, amount in needs.items()) for one in alive)
    if not found:
        raise ConfigurationError(
            f"none of the cluster's {len(alive)} nodes has {_needs_text(pool)} for a member",
            advice="reduce --cpus or --gpus, or add nodes",
        )
    return found


def _bundle(specification: PoolSpecification) -> dict[str, float]:
    amounts = {"CPU": specification.cpus, "GPU": specification.gpus}
    # Ray has no empty bundles.
    return {name: amount for name, amount in amounts.items() if amount} or {"CPU": 0.001}


def _needs_text(specification: PoolSpecification) -> str:
    return " and ".join(f"{amount:g} {name}" for name, amount in _bundle(specification).items())


def _registered(pool: PoolSpecification) -> tuple[PoolSpecification, bool]:
    """Return the specification of the pool of this name, which is created if it is missing, and
    whether this call created it."""
    token = secrets.token_hex(16)
    options: dict[str, Any] = {"num_cpus": 0, "max_restarts": -1, "max_task_retries": -1}
    head = "node:__internal_head__"
    if any(head in node["Resources"] for node in ray.nodes() if node["Alive"]):
        # The cluster depends on the head node anyway; the loss of another node must not end the
        # registry.
        options["resources"] = {head: 0.001}
    registry = (
        ray.remote(PoolRegistry)
        .options(name=pool.name, lifetime="detached", get_if_exists=True, **options)
        .remote(asdict(pool), token)
    )
    found = specification_from_json(_answer(registry.specification.remote(), "the registry"))
    if difference := pool.difference(found):
        raise ConfigurationError(
            f"the pool {pool.name!r} is up with another specification: {difference}",
            advice=f"`heliograph pool down --name {pool.name}` first, or choose another --name",
        )
    return found, _answer(registry.token.remote(), "the registry") == token


def _place(specification: PoolSpecification, deadline: float, progress: Progress) -> None:
    """Create a placement group with a bundle on each node, and a member in each bundle."""
    group = _group(specification.name) or _new_group(specification)
    begun = time.monotonic()
    is_reported = False
    while _group_state(specification.name) != "CREATED":
        placed = sum(_placed(specification.name).values())
        if not is_reported and time.monotonic() - begun > TELL_SECONDS:
            is_reported = True
            progress(
                f"waiting for nodes: {specification.members} members need {_needs_text(specification)} each, "
                f"the cluster has {len(_node_addresses())} nodes, and {placed} members are placed"
            )
        if time.monotonic() > deadline:
            raise _too_few(specification, placed)
        time.sleep(LOOK_SECONDS)
    for rank in range(specification.members):
        bundle = PlacementGroupSchedulingStrategy(group, rank, placement_group_capture_child_tasks=False)
        ray.remote(MemberSupervisor).options(
            name=member_name(specification.name, rank),
            lifetime="detached",
            get_if_exists=True,
            scheduling_strategy=bundle,
            num_cpus=specification.cpus,
            num_gpus=specification.gpus,
            max_restarts=-1,
            max_concurrency=4,
        ).remote(asdict(specification), rank)
    progress(f"{specification.members} members are placed, each on a node of its own")


def _new_group(specification: PoolSpecification) -> Any:
    """Create a placement group, or return that of a concurrent `up`: a name has one group."""
    bundles = [_bundle(specification)] * specification.members
    name = specification.name
    with contextlib.suppress(RaySystemError):
        return placement_group(bundles, strategy="STRICT_SPREAD", name=name, lifetime="detached")
    if (group := _group(name)) is None:
        raise UnavailableError(f"cannot create the placement group {name!r}", advice="try again")
    return group


def _too_few(specification: PoolSpecification, placed: int) -> HeliographError:
    nodes = len(_node_addresses())
    return ConfigurationError(
        f"the pool {specification.name!r} needs {specification.members} nodes with "
        f"{_needs_text(specification)} free each; too few of the cluster's {nodes} nodes have that, and "
        f"{placed} members are placed",
        advice="add nodes, free some (`ray status` shows their use), or reduce --members",
    )


def _serving(specification: PoolSpecification, deadline: float, progress: Progress) -> PoolStatus:
    """Wait until all members serve."""
    count = -1
    while (found := status(specification.name)).serving < specification.members:
        if found.serving != count:
            count = found.serving
            progress(f"{count} of {specification.members} members serve")
        for one in found.members:
            if one.starts >= HOPELESS_STARTS and not one.is_serving:
                raise ComputeFailedError(
                    f"the daemon of member {one.rank} on {one.node} does not start: {one.why}",
                    advice="correct the arguments of --serve; `ray logs` shows its whole log",
                )
        if time.monotonic() > deadline:
            raise _not_serving(found)
        time.sleep(LOOK_SECONDS)
    return found


def _not_serving(found: PoolStatus) -> HeliographError:
    missing = [one for one in found.members if not one.is_serving]
    what = "; ".join(f"member {one.rank}: {one.state} {one.why}".strip() for one in missing)
    return DeadlineExceededError(
        f"{found.serving} of {len(found.members)} members serve in time: {what}",
        advice="`heliograph pool status` shows more; a first start compiles kernels: raise --timeout",
    )


# Status


def status(name: str) -> PoolStatus:
    """Return the status of a pool. Raises ConfigurationError if there is none, UnavailableError."""
    registry = registry_of(name)
    specification = specification_from_json(_answer(registry.specification.remote(), "the registry"))
    reported = {one["rank"]: one for one in _answer(registry.members.remote(), "the registry")["members"]}
    placed = _placed(name)
    members = []
    for rank in range(specification.members):
        if not placed.get(rank):
            members.append(MemberStatus(rank, "lost", why="it waits for a node with room"))
        else:
            known = reported.get(rank, {"rank": rank, "state": "starting"})
            members.append(MemberStatus(**known))
    return PoolStatus(specification, _group_state(name), tuple(members))


def registry_of(name: str) -> Any:
    """The registry of a pool. Raises ConfigurationError if there is no such pool."""
    check_name(name)
    if (found := _find(name)) is None:
        others = ", ".join(sorted(pools())) or "none"
        raise ConfigurationError(
            f"there is no pool {name!r} in this cluster; there are: {others}",
            advice="`heliograph pool up --engine ray` creates one, --name selects one",
        )
    return found


def pools() -> list[str]:
    """The names of the pools of a cluster."""
    return [name for name in _actor_names() if "/" not in name]


def _actor_names() -> list[str]:
    found = ray.util.list_named_actors(all_namespaces=True)
    return [one["name"] for one in found if one["namespace"] == NAMESPACE]


def _find(actor: str) -> Any | None:
    try:
        return ray.get_actor(actor, namespace=NAMESPACE)
    except ValueError:
        return None


def _answer(reference: Any, who: str) -> Any:
    try:
        return ray.get(reference, timeout=ANSWER_SECONDS)
    except (GetTimeoutError, RayActorError) as error:
        raise UnavailableError(
            f"{who} does not answer: {_first_line(error)}",
            advice="`ray list actors` shows its state",
        ) from None


def _group(name: str) -> Any | None:
    with contextlib.suppress(ValueError):
        return ray.util.get_placement_group(name)
    return None


def _table(name: str) -> dict[str, Any]:
    group = _group(name)
    return placement_group_table(group) if group is not None else {}


def _group_state(name: str) -> str:
    return str(_table(name).get("state", "NONE"))


def _placed(name: str) -> dict[int, bool]:
    """By rank, True if the member has a living node."""
    alive = {node["NodeID"] for node in ray.nodes() if node["Alive"]}
    nodes = _table(name).get("bundles_to_node_id", {})
    return {rank: node in alive for rank, node in nodes.items()}


# Down


@dataclass(frozen=True, slots=True)
class StoppedPool:
    """The result of `down`."""

    members: int
    #: The daemons that were killed, as their work did not end in time or their supervisor did not
    #: answer.
    killed: int


def down(name: str, seconds: float, progress: Progress) -> StoppedPool:
    """Stop the daemons within `seconds`, then remove the pool. A missing pool is no error.

    Raises DeadlineExceededError if an actor is still there after that.
    """
    check_name(name)
    members = [one for one in _actor_names() if one.startswith(f"{name}/")]
    drained = sum(_stopped([actor for one in members if (actor := _find(one)) is not None], seconds))
    for actor in filter(None, map(_find, members)):
        ray.kill(actor, no_restart=True)
    if (group := _group(name)) is not None:
        remove_placement_group(group)
    if (registry := _find(name)) is not None:
        ray.kill(registry, no_restart=True)
    if members:
        progress(f"stopped {len(members)} members")
    _until_gone(name)
    return StoppedPool(len(members), len(members) - drained)


def _stopped(actors: list[Any], seconds: float) -> Iterator[bool]:
    """Stop the daemons; for each that answers, yield True if it ended in time."""
    stops = [actor.stop.remote(seconds) for actor in actors]
    if not stops:
        return
    # An actor that is restarting or waits for a node does not answer.
    done, _ = ray.wait(stops, num_returns=len(stops), timeout=seconds + 2 * LOOK_SECONDS)
    for reference in done:
        try:
            yield bool(ray.get(reference))
        except RayError:
            yield False


def _until_gone(name: str) -> None:
    deadline = time.monotonic() + ANSWER_SECONDS
    while left := [one for one in _actor_names() if one == name or one.startswith(f"{name}/")]:
        if time.monotonic() > deadline:
            raise DeadlineExceededError(
                f"{', '.join(left)} were stopped and are still there",
                advice="`ray list actors` shows their state",
            )
        time.sleep(LOOK_SECONDS)


# Watching


def watched(name: str, seconds: float) -> Iterator[dict[str, Any]]:
    """Yield the registry's `members` and `is_settled` at each step, or the reason why they are
    unknown as `absent`.

    A step takes at most `seconds`. Ends only with this process.
    """
    registry: Any = None
    while True:
        try:
            registry = registry if registry is not None else registry_of(name)
            found = ray.get(registry.members.remote(), timeout=seconds)
        except Exception as error:  # of any type of Ray's; the registry may come back
            registry = None
            yield {"absent": _first_line(error)}
        else:
            members = [{key: one[key] for key in ("rank", "state", "url", "pid")} for one in found["members"]]
            yield {"members": members, "is_settled": found["is_settled"]}
