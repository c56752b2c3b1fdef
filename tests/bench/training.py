"""A step of training a PyTorch module beside eager torch, on one thread each and on two.

The two run in turn, so that a drift of the machine meets both; the note has the ratio of processor
time, which other work on the machine disturbs less. `make bench-training` installs torch and runs
it; ONLY names some of perceptron, resnet and gpt.
"""

from __future__ import annotations

import copy
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from figures import REST_SECONDS, Figure, shared

import heliograph as hg

sys.path.append(str(Path(__file__).parents[1] / "support"))

THREADS = (1, 2)
BAR = 1.5
ROUNDS = 12


def figures() -> Iterator[Figure]:
    """Milliseconds a step."""
    try:
        import torch
    except ModuleNotFoundError:
        print("no figures of training: torch is not installed", file=sys.stderr)
        return
    import torch_training as cases
    from torch.nn import functional

    torch.manual_seed(0)
    perceptron = torch.nn.Sequential(
        torch.nn.Linear(784, 512),
        torch.nn.ReLU(),
        torch.nn.Linear(512, 512),
        torch.nn.ReLU(),
        torch.nn.Linear(512, 10),
    )
    classes = torch.randint(0, 10, (128,))
    tokens = torch.randint(0, 1000, (4, 129))
    gpt = cases.GPT(layers=6, width=256, heads=8, words=1000)
    gpt.places = torch.nn.Embedding(128, 256)
    made: dict[str, tuple[Any, Any, tuple[Any, ...]]] = {
        "perceptron": (perceptron, functional.cross_entropy, (torch.randn(128, 784), classes)),
        "resnet": (
            cases.residual(1, 32, 32, 32).module,
            functional.cross_entropy,
            (torch.randn(32, 3, 32, 32), classes[:32]),
        ),
        "gpt": (gpt, cases.of_tokens, (tokens[:, :-1], tokens[:, 1:])),
    }
    wanted = [
        name
        for name in made
        if len(sys.argv) < 2 or name in sys.argv[1:] or Path(sys.argv[0]).stem != "training"
    ]
    for threads in THREADS:
        torch.set_num_threads(threads)
        with hg.connect(f"local:#cpu:threads={threads}") as session:
            for name in wanted:
                for kind in (torch.optim.SGD, torch.optim.AdamW):
                    title = f"training-{name}-{kind.__name__.lower()}-{threads}"
                    yield _figure(session, title, kind, *made[name])


def _figure(
    session: hg.Session, title: str, kind: Any, module: Any, loss: Any, batch: tuple[Any, ...]
) -> Figure:
    options = {"momentum": 0.9} if kind.__name__ == "SGD" else {}
    eager = copy.deepcopy(module)
    optimizer = kind(eager.parameters(), lr=1e-3, **options)

    def peer() -> None:
        optimizer.zero_grad()
        *inputs, target = batch
        found = loss(eager(*inputs), target)
        found.backward()
        optimizer.step()
        found.item()

    ours = copy.deepcopy(module)
    with hg.torch.Trainer(ours, loss, kind(ours.parameters(), lr=1e-3, **options), session) as trainer:
        wall, cpu = _turns(lambda: trainer.step(*batch).item(), peer)
    return Figure(
        title,
        wall[0] * 1e3,
        wall[1] * 1e3,
        BAR,
        "ms",
        "eager torch, as many threads",
        f"processor time {cpu[0] / cpu[1]:.2f} of torch's",
    )


def _turns(ours: Callable[[], object], peer: Callable[[], object]) -> tuple[list[float], list[float]]:
    """The medians of the time and the processor time of two calls, each run in turn."""
    wall: tuple[list[float], list[float]] = ([], [])
    cpu: tuple[list[float], list[float]] = ([], [])
    for _ in range(shared(ROUNDS)):
        for call, seconds, processor in zip((ours, peer), wall, cpu, strict=True):
            time.sleep(REST_SECONDS)
            call()
            began, used = time.perf_counter(), time.process_time()
            call()
            seconds.append(time.perf_counter() - began)
            processor.append(time.process_time() - used)
    return [statistics.median(one) for one in wall], [statistics.median(one) for one in cpu]


if __name__ == "__main__":
    for one in figures():
        verdict = "ok" if one.ok else "short"
        print(
            f"{one.name}: {one.ours:.1f} ms, torch {one.peer:.1f} ms, {one.ratio:.2f} of {one.bar}, {verdict}"
        )
        print(f"  {one.note}", flush=True)
