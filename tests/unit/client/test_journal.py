"""The journal of runs and what it decides, as pure objects; checkpoints in files."""

from __future__ import annotations

import random
from pathlib import Path

import numpy as np
import pytest

import heliograph as hg
from heliograph.procedures.compile import Compilation
from heliograph.procedures.journal import ENTRY_BYTES, Journal, JournalEntry, placed_on, survivors
from heliograph_proto.errors import DeviceLostError, MemberLostError
from heliograph_proto.plans import PlanOptions, RowSplit
from heliograph_proto.types import tensor_type

LOSS = MemberLostError("member left is lost")


def run(
    assigns: str = "", *, ended: bool | None = True, delivered: bool = True, size: int = 4
) -> JournalEntry:
    made = JournalEntry(None, [np.zeros(size, np.uint8)], frozenset(assigns), bool(assigns), sent=True)
    made.ended_well, made.delivered = ended, delivered
    return made


def journal(*entries: JournalEntry, base: bool = True, limit: int = 2**20) -> Journal:
    made = Journal(limit)
    if base:
        made.restart({})
    for one in entries:
        made.add(one)
    return made


def test_runs_that_assigned_and_runs_that_somebody_waits_for_are_repeated_in_order() -> None:
    first, second = run("a"), run(ended=True)
    third, fourth = run("a", ended=None, delivered=False), run(ended=None, delivered=False)
    found = journal(first, second, third, fourth).to_repeat(LOSS)
    assert found == [(first, False), (third, True), (fourth, True)]


def test_runs_that_were_not_sent_are_not_repeated() -> None:
    waiting = run("a", ended=None, delivered=False)
    waiting.sent = False
    assert journal(waiting).to_repeat(LOSS) == []


@pytest.mark.parametrize(
    ("entry", "base", "why"),
    [
        (run("a"), False, "no checkpoint"),
        (run("a", ended=False), True, "another reason"),
    ],
)
def test_a_state_that_cannot_be_made_again_is_refused(entry: JournalEntry, base: bool, why: str) -> None:
    with pytest.raises(MemberLostError, match=f"member left is lost; the plan is not rebuilt: .*{why}"):
        journal(entry, base=base).to_repeat(LOSS)


def test_a_run_that_cannot_be_repeated_spoils_the_state_only_if_it_assigned() -> None:
    reads, writes = run(ended=None, delivered=False), run("a", ended=None, delivered=False)
    reads.why_not = writes.why_not = "an input is a tensor"
    assert journal(reads).to_repeat(LOSS) == []
    with pytest.raises(DeviceLostError, match="an input is a tensor"):
        journal(writes).to_repeat(LOSS)


def test_a_checkpoint_starts_it_anew() -> None:
    made = journal(run("a", ended=False))
    made.sweep()
    assert made.why_not
    made.restart({"a": np.zeros(1)})
    assert made.to_repeat(LOSS) == [] and made.size_bytes == 0


def test_it_has_no_more_bytes_than_it_may() -> None:
    seed = random.randrange(2**32)
    print("seed", seed)
    chance = random.Random(seed)
    limit = 40 * ENTRY_BYTES
    made = journal(limit=limit)
    for _ in range(500):
        made.add(run(chance.choice(["", "a"]), size=chance.randrange(1000)))
        assert made.size_bytes <= 2 * limit + 2 * ENTRY_BYTES
    made.sweep()
    assert made.size_bytes <= limit and "more often" in made.why_not


def test_random_journals_repeat_what_assigned_since_the_checkpoint_and_nothing_else() -> None:
    seed = random.randrange(2**32)
    print("seed", seed)
    chance = random.Random(seed)
    for _ in range(200):
        made, expected = journal(), []
        for _ in range(chance.randrange(60)):
            if chance.random() < 0.05:
                made.restart({})
                expected.clear()
            one = run(chance.choice(["", "a", "b"]))
            made.add(one)
            expected += [(one, False)] if one.assigns else []
        assert made.to_repeat(LOSS) == expected, f"seed {seed}"


def test_what_is_asked_of_lost_devices_is_dropped() -> None:
    options = PlanOptions(
        ("a", "b", "c"),
        pins=(("a", (1,)), ("b", (2,))),
        memory=(("a", 1), ("c", 2)),
        buffer_types=(("a", "x"),),
        splits=((RowSplit("a", (("a", 0.5), ("b", 0.5))), (0,)), (RowSplit("a", (("a", 1.0),)), (1,))),
    )
    how = Compilation(options, reservation=7)
    left = survivors(LOSS, options.devices, {"b", "c"})
    again = placed_on(how, left)
    found = again.options
    assert left == found.devices == ("b", "c") and again.renews_lost
    assert found.pins == (("b", (2,)),) and found.memory == (("c", 2),) and not found.buffer_types
    assert found.splits == ((RowSplit("b", (("b", 0.5),)), (0,)),) and not again.reservation


def test_without_survivors_the_loss_says_what_to_do() -> None:
    with pytest.raises(MemberLostError, match="none of its devices is left: a, b") as refusal:
        survivors(LOSS, ("a", "b"), {"c"})
    assert "devices=[...]" in refusal.value.advice


def test_a_checkpoint_comes_back_from_its_file(tmp_path: Path) -> None:
    types = {
        "layer0/cache": tensor_type("bf16", (2, 3)),
        "count": tensor_type("i64", ()),
        "rows": tensor_type("q8_0", (2, 32)),
    }
    arrays = {
        "layer0/cache": np.arange(6).reshape(2, 3).astype(types["layer0/cache"].dtype.numpy),
        "count": np.full((), 7, np.int64),
        "rows": np.arange(68, dtype=np.uint8).reshape(2, 34),
    }
    made = hg.Checkpoint(arrays, types)
    made.save(tmp_path / "one.npz")
    found = hg.load_checkpoint(tmp_path / "one.npz")
    assert found.types == types and found.taken == made.taken and found.nbytes == made.nbytes == 88
    for name, array in arrays.items():
        assert found[name].dtype == array.dtype and found[name].shape == array.shape
        assert found[name].tobytes() == array.tobytes()


def test_a_file_that_is_no_checkpoint_is_refused(tmp_path: Path) -> None:
    with pytest.raises(hg.InvalidModelError, match="is not a checkpoint"):
        hg.load_checkpoint(tmp_path / "none.npz")
    (tmp_path / "text.npz").write_text("nothing")
    with pytest.raises(hg.InvalidModelError, match="is not a checkpoint"):
        hg.load_checkpoint(tmp_path / "text.npz")
    np.savez(tmp_path / "other.npz", a=np.ones(3))
    with pytest.raises(hg.InvalidModelError, match="is not a checkpoint"):
        hg.load_checkpoint(tmp_path / "other.npz")
    with pytest.raises(hg.InvalidArgumentError, match="cannot write"):
        hg.Checkpoint({}, {}).save(tmp_path / "no" / "folder.npz")
