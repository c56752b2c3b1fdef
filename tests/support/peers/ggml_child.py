"""A call in a copy of this process, which ggml may end."""

from __future__ import annotations

import os
import pickle
import select
import signal
from collections.abc import Callable
from typing import TypeVar

from peers.ggml import backend

R = TypeVar("R")
TRIAL_SECONDS = 20.0


def in_child(function: Callable[[], R]) -> R | None:
    """What the function returned in a copy of this process; None if it raised, ended or took too long."""
    backend()
    ours, theirs = os.pipe()
    child = os.fork()
    if not child:
        _answer(theirs, function)
    os.close(theirs)
    pieces = []
    while select.select([ours], [], [], TRIAL_SECONDS)[0] and (piece := os.read(ours, 2**16)):
        pieces.append(piece)
    os.close(ours)
    os.kill(child, signal.SIGKILL)
    os.waitpid(child, 0)
    try:
        found: R = pickle.loads(b"".join(pieces))
    except (EOFError, pickle.UnpicklingError):
        return None
    return found


def _answer(pipe: int, function: Callable[[], object]) -> None:
    """In the child: writes the answer and ends, without what a process does at its end."""
    try:
        os.dup2(os.open(os.devnull, os.O_WRONLY), 2)
        with os.fdopen(pipe, "wb") as file:
            pickle.dump(function(), file)
    finally:
        os._exit(0)
