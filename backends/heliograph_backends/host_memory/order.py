"""The order of the bytes of a weight in host memory: their own, or the form that kernels read best.

A form takes the bytes that the weight has, and is made in place. So a weight lies in memory once,
also while plans read it in a form. `Buffer.get` and copies give the bytes in their own order.

A plan holds an order as long as it is bound to the weight. While one form is held, everyone else
who reads the bytes in place gets a copy in their own order, which is counted as device memory and
freed after its last holder. A write by `Buffer.set`, a copy or a run's output reaches all of them.
A plan that assigns the bytes needs them in place, so it is refused while a form or a copy is held.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol, TypeAlias

import numpy as np

from heliograph_proto.errors import InvalidArgumentError

if TYPE_CHECKING:
    from heliograph_backends.host_memory.buffers import MemoryBudget

Bytes: TypeAlias = np.ndarray[Any, np.dtype[np.uint8]]


class Form(Protocol):
    """An order of bytes. Forms are compared: equal ones are the same order."""

    @property
    def size_bytes(self) -> int:
        """The bytes that have this form; always all of a buffer."""

    def pack(self, memory: Bytes) -> None:
        """Bring bytes from their own order into this one."""

    def unpack(self, memory: Bytes) -> None:
        """Bring bytes from this order into their own."""

    def read(self, memory: Bytes, offset_bytes: int, out: memoryview) -> None:
        """Read bytes of `memory`, which has this form, in their own order."""

    def write(self, memory: Bytes, offset_bytes: int, data: memoryview) -> None:
        """Write bytes, given in their own order, to `memory`, which has this form."""


def _nothing() -> None:
    """Release bytes whose holders are not counted."""


@dataclass(frozen=True, slots=True)
class Held:
    """Bytes in an order that stays until `release`."""

    memory: Bytes
    #: The address of the first byte.
    address: int
    #: None: their own order.
    form: Form | None = None
    #: To be called once.
    release: Callable[[], None] = _nothing


class ByteOrder:
    """The order of one buffer's bytes. Thread-safe."""

    def __init__(self, memory: Bytes, budget: MemoryBudget, allocate: Callable[[int], Bytes]) -> None:
        self._memory = memory
        self._address = int(memory.ctypes.data)
        self._budget = budget
        self._allocate = allocate
        self._lock = threading.Lock()
        self._form: Form | None = None
        #: The number of holders of the form, of the own order in place, and of the copy.
        self._form_holders = self._plain_holders = self._copy_holders = 0
        self._copy: Bytes | None = None

    def hold(self, form: Form | None = None, *, writes: bool = False) -> Held:
        """Hold the bytes in a form if no other order is held in place, else in their own.

        A holder that `writes` has them in their own order and in place, so that others see what it
        writes. Raises OutOfMemoryError if that takes a copy, and there is no memory for it, and
        InvalidArgumentError if a holder that writes cannot have them in place.
        """
        with self._lock:
            if writes and (self._form_holders or self._copy_holders):
                raise InvalidArgumentError(
                    "a tensor that a plan assigns is the packed weight of another plan",
                    advice="free that plan first, or keep the tensor in memory without usage='weights'",
                )
            if form is not None and form.size_bytes == self._memory.nbytes and self._take_form(form):
                self._form_holders += 1
                return Held(self._memory, self._address, form, self._release_form)
            if self._form is None or not self._form_holders:
                self._restore()
                self._plain_holders += 1
                return Held(self._memory, self._address, release=self._release_plain)
            if self._copy is None:
                self._copy = self._copied(self._form)
            self._copy_holders += 1
            return Held(self._copy, int(self._copy.ctypes.data), release=self._release_copy)

    def read(self, offset_bytes: int, out: memoryview) -> None:
        """Read bytes in their own order."""
        with self._lock:
            if self._form is not None:
                self._form.read(self._memory, offset_bytes, out)
            else:
                np.frombuffer(out, np.uint8)[:] = self._memory[offset_bytes : offset_bytes + out.nbytes]

    def write(self, offset_bytes: int, data: memoryview) -> None:
        """Write bytes, given in their own order. All holders have them; no plan runs meanwhile."""
        with self._lock:
            if self._form is not None:
                self._form.write(self._memory, offset_bytes, data)
            for memory in (self._memory if self._form is None else None, self._copy):
                if memory is not None:
                    memory[offset_bytes : offset_bytes + data.nbytes] = np.frombuffer(data, np.uint8)

    def free(self) -> None:
        """Stop counting the copy. Holders of an order keep its memory."""
        with self._lock:
            self._drop_copy()

    def _take_form(self, form: Form) -> bool:
        """Bring the bytes into a form; False if they must stay in another order."""
        if self._form != form:
            if self._plain_holders or (self._form is not None and self._form_holders):
                return False
            self._restore()
            form.pack(self._memory)
            self._form = form
        return True

    def _restore(self) -> None:
        if self._form is not None:
            self._form.unpack(self._memory)
            self._form = None

    def _copied(self, form: Form) -> Bytes:
        self._budget.take(
            self._memory.nbytes,
            "for a weight that other plans read packed",
            "or free the plans that use it in matrix products",
        )
        try:
            copy = self._allocate(self._memory.nbytes)
        except BaseException:
            self._budget.give(self._memory.nbytes)
            raise
        form.read(self._memory, 0, copy.data)
        return copy

    def _release_form(self) -> None:
        with self._lock:
            self._form_holders -= 1

    def _release_plain(self) -> None:
        with self._lock:
            self._plain_holders -= 1

    def _release_copy(self) -> None:
        with self._lock:
            self._copy_holders -= 1
            if not self._copy_holders:
                self._drop_copy()

    def _drop_copy(self) -> None:
        if self._copy is not None:
            self._budget.give(self._copy.nbytes)
            self._copy = None
