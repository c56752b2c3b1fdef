"""Sessions in the kernel of a notebook: views, interrupts, progress, completion and tracebacks."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from daemon_urls import DaemonUrls
from kernels import Kernel, Shown, running_kernel

pytest.importorskip("ipykernel", reason="needs ipykernel")
pytest.importorskip("jupyter_client", reason="needs jupyter_client")

START = """
import numpy as np
import heliograph as hg
session = hg.connect({url!r})
def small():
    g = hg.Graph()
    g.output("y", g.input("x", (4,), "f32") + 1)
    return g
plan = session.compile(small())
x = np.arange(4, dtype=np.float32)
"""

#: The work of a cell until it is interrupted.
WORK = {
    "an upload": """
big = np.ones(2**25, np.uint8)
target = session.empty(big.shape, "u8")
while True:
    target.set(big)
    print("begun", flush=True)
""",
    "a download": """
target = session.empty(2**25, "u8")
while True:
    target.get()
    print("begun", flush=True)
""",
    "a run": """
g = hg.Graph()
y = given = g.input("x", (512, 512), "f32")
for _ in range(400):
    y = y @ given
g.output("y", y)
long = session.compile(g)
eye = np.eye(512, dtype=np.float32)
print("begun", flush=True)
while True:
    long.run(x=eye)
""",
    "a loop": """
print("begun", flush=True)
plan.loop(x=x, steps=10**9, carry={"y": "x"}).result()
""",
    "a compile": """
def deep(count):
    g = hg.Graph()
    y = g.input("x", (4,), "f32")
    for number in range(count):
        y = y * (1 + number / count)
    g.output("y", y)
    return g
count = 1000
print("begun", flush=True)
while True:
    count += 1
    session.compile(deep(count)).free()
""",
    "uploads of weights": """
print("begun", flush=True)
seed = 0
while True:
    seed += 1
    g = hg.Graph()
    g.output("y", g.weight("w", np.random.default_rng(seed).random(2**21, np.float32)) + 1)
    session.compile(g).free()
""",
}

AIO = """
session = await hg.aio.connect({url!r})
plan = await session.compile(small())
"""
AIO_WORK = {
    "a loop": """
print("begun", flush=True)
await plan.loop(x=x, steps=10**9, carry={"y": "x"}).result()
""",
    "an upload": """
big = np.ones(2**25, np.uint8)
target = session.empty(big.shape, "u8")
print("begun", flush=True)
while True:
    await target.set(big)
""",
}

#: Seconds after the work has begun: later than the printing of that, in which IPython takes an
#: interrupt for its own.
AFTER = (0.05, 0.1, 0.2)


def is_interrupted(shown: Shown) -> bool:
    """True if the cell ended by the interrupt. One that IPython's own code takes is a line of text."""
    return shown.error == "KeyboardInterrupt" or "KeyboardInterrupt" in shown.text


@pytest.fixture(scope="module")
def kernel(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Kernel]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("IPYTHONDIR", str(tmp_path_factory.mktemp("ipython")))
        with running_kernel() as found:
            yield found


def begin(kernel: Kernel, daemon: DaemonUrls, transport: str) -> None:
    url = {"tcp": daemon.tcp, "unix": daemon.unix, "local": "local:"}[transport]
    assert not kernel.run(START.format(url=url)).traceback


@pytest.mark.parametrize("transport", ["tcp", "unix", "local"])
@pytest.mark.parametrize("what", WORK)
def test_an_interrupt_ends_the_cell_and_the_session_goes_on(
    kernel: Kernel, daemon: DaemonUrls, what: str, transport: str
) -> None:
    begin(kernel, daemon, transport)
    for after in AFTER:
        shown = kernel.run(WORK[what], interrupt_at="begun", after=after)
        assert is_interrupted(shown), shown.traceback
        again = kernel.run(
            "print(plan.run(x=x, timeout=30)['y'], session.put(x).get()[3], session.closed)\n"
            "session.synchronize(timeout=30)"
        )
        assert again.text == "[1. 2. 3. 4.] 3.0 False\n", again.traceback
    assert not kernel.run("session.close()").traceback


@pytest.mark.parametrize("what", AIO_WORK)
def test_an_interrupt_of_an_asynchronous_cell_does_the_same(
    kernel: Kernel, daemon: DaemonUrls, what: str
) -> None:
    begin(kernel, daemon, "tcp")
    assert not kernel.run("session.close()\n" + AIO.format(url=daemon.tcp)).traceback
    for after in AFTER:
        shown = kernel.run(AIO_WORK[what], interrupt_at="begun", after=after)
        assert is_interrupted(shown) or shown.error == "CancelledError", shown.traceback
        again = kernel.run("print((await plan.run(x=x, timeout=30))['y'], session.closed)")
        assert again.text == "[1. 2. 3. 4.] False\n", again.traceback
    assert not kernel.run("await session.close()").traceback


def test_objects_are_shown_as_tables(kernel: Kernel, daemon: DaemonUrls) -> None:
    begin(kernel, daemon, "tcp")
    for shown, words in (
        ("session", "cpu0"),
        ("session.devices[0]", "used"),
        ("small()", "nodes by op"),
        ("plan", "splits"),
        ("plan.explain()", "splits"),
        ("session.put(np.arange(12, dtype=np.float32).reshape(3, 4))", "mean ± deviation"),
    ):
        (html,) = kernel.run(shown).html
        assert words in html and "<table" in html, shown
    kernel.run("session.close()")


def test_inputs_are_completed(kernel: Kernel, daemon: DaemonUrls) -> None:
    begin(kernel, daemon, "tcp")
    kernel.run(
        "g = hg.Graph(); g.output('y', g.input('token', (2,), 'f32') + g.input('position', (2,), 'f32'))\n"
        "both = session.compile(g)\nanswer = both.run(token=x[:2], position=x[:2])"
    )
    for method in ("run", "submit", "loop", "profile"):
        found = kernel.completions(f"both.{method}(")
        assert {"token=", "position="} <= set(found)
    assert "token=" in kernel.completions("both.run(to")
    # After an update to another graph, its inputs.
    kernel.run("both.update(small())")
    assert "x=" in kernel.completions("both.run(") and "token=" not in kernel.completions("both.run(")
    kernel.run("session.close()")


def test_a_traceback_ends_at_the_cell(kernel: Kernel, daemon: DaemonUrls) -> None:
    begin(kernel, daemon, "tcp")
    shown = kernel.run("def wrong():\n    return plan.run(x=np.zeros(5, np.float32))\nwrong()")
    assert shown.error == "InvalidInputError"
    assert "return plan.run" in shown.traceback and "heliograph/" not in shown.traceback
    kernel.run("session.close()")


def test_what_takes_long_has_a_bar_in_the_output(kernel: Kernel, daemon: DaemonUrls) -> None:
    begin(kernel, daemon, "tcp")
    # The time that each takes is the machine's; the second after which bars appear is set to none.
    kernel.run("import heliograph.core.progress.bars as shown; shown.SHOWN_SECONDS = -1.0")
    found = kernel.run("tensor = session.put(np.ones(2**25, np.uint8))\nfound = tensor.get()")
    bars = " ".join(found.html)
    assert "sending a tensor" in bars and "receiving a tensor: 32.0 MiB in" in bars and "<progress" in bars
    found = kernel.run("for step in (steps := hg.track(range(5))):\n    steps.show(loss=1 / (1 + step))")
    assert "training: 5 in" in found.html[-1] and "loss 0.2" in found.html[-1]
    kernel.run("session.close()")
