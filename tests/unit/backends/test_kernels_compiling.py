"""The compiling of CPU kernels by processes of their own, and by this one where that fails."""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest

from heliograph_backends.cpu.kernels import available
from heliograph_backends.cpu.kernels.program.words import TABLE, Kind, Place
from heliograph_backends.cpu.kernels.runtime import compiling
from heliograph_backends.cpu.kernels.runtime.compiling import PROCESS_BYTES, Compiling, process_count
from heliograph_backends.cpu.kernels.runtime.objects import CORE, MODULES, ObjectFolder, machine_digest

if not available():
    pytest.skip("numba is not installed", allow_module_level=True)

SECONDS = 60.0

#: A compiler whose object code is the name of the entry; it cannot compile `bad`.
COMPILER = """
import sys
from pathlib import Path
from heliograph_backends.cpu.kernels.runtime.objects import ObjectFolder
for line in sys.stdin:
    name = line.strip()
    if name == "bad":
        sys.exit(1)
    ObjectFolder(Path(sys.argv[1]), "here").write(name, name.encode())
    print(name, flush=True)
"""


class Watched:
    """A compiling of some entries, and what it did."""

    def __init__(self, folder: Path, entries: Sequence[str]) -> None:
        self.done: list[tuple[str, bytes]] = []
        self.first = threading.Event()
        self.compiling = Compiling(ObjectFolder(folder, "here"), entries, self._was_done)

    def _was_done(self, entry: str, code: bytes) -> None:
        self.done.append((entry, code))
        self.first.set()

    @property
    def names(self) -> list[str]:
        return [name for name, _ in self.done]


@pytest.fixture
def one_process(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compiling, "_COMPILER", COMPILER)
    monkeypatch.setattr(compiling, "machine_memory_bytes", lambda: 2 * PROCESS_BYTES)


@pytest.fixture
def compiled_here(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The entries that this process compiles, without a compiler."""
    from heliograph_backends.cpu.kernels.runtime import emitting

    here: list[str] = []

    def compile_entry(name: str) -> bytes:
        here.append(name)
        return b"here"

    monkeypatch.setattr(emitting, "compile_entry", compile_entry)
    return here


@pytest.mark.usefixtures("one_process")
def test_another_process_compiles_one_entry_after_the_other(tmp_path: Path, compiled_here: list[str]) -> None:
    it = Watched(tmp_path, ["one", "two", "three"])
    it.compiling.run()
    assert it.done == [("one", b"one"), ("two", b"two"), ("three", b"three")]
    assert compiled_here == []


@pytest.mark.usefixtures("one_process")
def test_what_somebody_waits_for_goes_first(tmp_path: Path) -> None:
    it = Watched(tmp_path, ["one", "two", "three"])
    it.compiling.hasten(["three"])
    it.compiling.run()
    assert it.names == ["three", "one", "two"]


@pytest.mark.usefixtures("one_process")
def test_this_process_compiles_what_the_other_one_cannot(tmp_path: Path, compiled_here: list[str]) -> None:
    it = Watched(tmp_path, ["one", "bad", "two"])
    it.compiling.run()
    assert it.names == ["one", "bad", "two"] and compiled_here == ["bad", "two"]
    assert ObjectFolder(tmp_path, "here").read("bad") == b"here"


@pytest.mark.usefixtures("one_process")
@pytest.mark.parametrize("executable", ["", "/nowhere/python", "/bin/false"])
def test_this_process_compiles_where_no_other_can_be_started(
    executable: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, compiled_here: list[str]
) -> None:
    monkeypatch.setattr(sys, "executable", executable)
    it = Watched(tmp_path, ["one", "two"])
    it.compiling.run()
    assert it.names == compiled_here == ["one", "two"]


def test_this_process_compiles_where_no_folder_can_be_written_to(compiled_here: list[str]) -> None:
    done: list[str] = []
    Compiling(None, ["one"], lambda entry, code: done.append(entry)).run()
    assert done == compiled_here == ["one"]


def test_kernels_are_used_also_where_they_cannot_be_kept(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    compiled_here: list[str],
    caplog: pytest.LogCaptureFixture,
) -> None:
    monkeypatch.setattr(sys, "frozen", True, raising=False)
    it = Watched(tmp_path / "missing", ["one"])
    it.compiling.run()
    assert it.done == [("one", b"here")] and "not kept on disk" in caplog.text


@pytest.mark.usefixtures("one_process")
def test_an_end_ends_the_other_process(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, compiled_here: list[str]
) -> None:
    monkeypatch.setattr(compiling, "_COMPILER", COMPILER + "    sys.stdin.read()\n")
    it = Watched(tmp_path, ["one", "two"])
    running = threading.Thread(target=it.compiling.run)
    running.start()
    assert it.first.wait(SECONDS)
    it.compiling.stop()
    running.join(SECONDS)
    assert not running.is_alive() and it.names == ["one"] and compiled_here == []


def test_there_are_as_many_processes_as_processors_and_memory_allow(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("os.sched_getaffinity", lambda process: set(range(4)), raising=False)
    monkeypatch.setattr(compiling, "machine_memory_bytes", lambda: 2**40)
    assert process_count(15) == 4 and process_count(2) == 2
    monkeypatch.setattr(compiling, "machine_memory_bytes", lambda: 4 * PROCESS_BYTES)
    assert process_count(15) == 2
    monkeypatch.setattr(compiling, "machine_memory_bytes", lambda: 1)
    assert process_count(15) == 1


def test_the_other_process_finds_its_module() -> None:
    from heliograph_backends.cpu.kernels.runtime import emitting

    names: dict[str, object] = {}
    exec(compiling._COMPILER.partition(";")[0], names)
    assert names["emitting"] is emitting


def test_every_entry_has_a_place_or_is_called_by_python() -> None:
    assert {*TABLE.values(), *CORE} == set(MODULES)
    assert set(TABLE) == {*Kind, *Place} and sorted(TABLE) == list(range(len(TABLE)))


def _cut(data: bytes) -> bytes:
    return data[:-1]


def _flipped(data: bytes) -> bytes:
    return bytes([data[0] ^ 1]) + data[1:]


@pytest.mark.parametrize("broken", [_cut, _flipped, lambda data: b""])
def test_a_broken_file_is_as_a_missing_one(broken: Callable[[bytes], bytes], tmp_path: Path) -> None:
    folder = ObjectFolder(tmp_path, "here")
    assert folder.read("one") is None
    folder.write("one", b"code")
    assert folder.read("one") == b"code"
    folder.file("one").write_bytes(broken(folder.file("one").read_bytes()))
    assert folder.read("one") is None


def test_code_of_another_processor_or_compiler_is_not_found(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    here = machine_digest()
    ObjectFolder(tmp_path, here).write("one", b"code")
    assert ObjectFolder(tmp_path, machine_digest()).read("one") == b"code"
    monkeypatch.setenv("NUMBA_CPU_NAME", "generic")
    assert ObjectFolder(tmp_path, machine_digest()).read("one") is None
    monkeypatch.delenv("NUMBA_CPU_NAME")
    monkeypatch.setattr("llvmlite.binding.get_host_cpu_name", lambda: "another")
    assert machine_digest() != here
