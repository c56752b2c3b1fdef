"""Removes files from an environment that a daemon never reads: `slim.py ENVIRONMENT`.

It removes the packages' own tests, type stubs, sources and headers in C and Cython, build tools,
and the symbol and section tables of shared libraries, which only debuggers read. Imported modules
stay. The Dockerfile runs it once, before compiling bytecode.
"""

from __future__ import annotations

import shutil
import struct
import sys
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

#: Folders to remove anywhere: a package's tests, and bytecode, which is compiled again later.
FOLDERS = frozenset({"tests", "__pycache__"})
#: Folders below site-packages that nothing imports unless it compiles extensions.
TOOLS = (
    "numpy/f2py",
    "numpy/distutils",
    "numpy/_core/include",
    "numpy/_core/lib",
    "numpy/random/lib",
    "numba/pycc",
)
SUFFIXES = frozenset({".a", ".c", ".cpp", ".h", ".hpp", ".pxd", ".pxi", ".pyi", ".pyx"})
LIBRARIES = ("*.so", "*.so.*")

#: ELF's header and one of its program headers, in 64 bits, little-endian.
HEADER = struct.Struct("<16sHHIQQQIHHHHHH")
SEGMENT = struct.Struct("<IIQQQQQQ")
MAGIC = b"\x7fELF\x02\x01"


def without_tables(data: bytes) -> bytes:
    """Return a shared library without its symbols and section table, which are in no segment.

    The mapped bytes stay the same. Returns files other than 64-bit little-endian ELF unchanged.
    """
    if not data.startswith(MAGIC) or len(data) < HEADER.size:
        return data
    fields = list(HEADER.unpack_from(data))
    first, size, count = fields[5], fields[9], fields[10]
    segments = [SEGMENT.unpack_from(data, first + number * size) for number in range(count)]
    ends = [offset + in_file for _, _, offset, _, _, in_file, _, _ in segments]
    end = max(ends, default=0)
    if not HEADER.size <= end <= len(data) or first + size * count > end:
        return data
    fields[6] = fields[12] = fields[13] = 0  # no sections: offset, number, index of their names
    return HEADER.pack(*fields) + data[HEADER.size : end]


def unneeded(packages: Path) -> Iterator[Path]:
    """Files and folders to remove, with those inside of such folders."""
    for path in packages.rglob("*"):
        if path.is_dir():
            if path.name in FOLDERS or path.relative_to(packages).as_posix() in TOOLS:
                yield path
        elif path.suffix in SUFFIXES:
            yield path


def slim(packages: Path) -> None:
    """Remove the unneeded files, and shorten libraries."""
    for path in list(unneeded(packages)):
        if path.is_dir():
            shutil.rmtree(path, ignore_errors=True)
        else:
            path.unlink(missing_ok=True)
    for pattern in LIBRARIES:
        for path in packages.rglob(pattern):
            data = path.read_bytes()
            less = without_tables(data)
            if len(less) < len(data):
                path.write_bytes(less)


def sizes(packages: Path) -> Counter[str]:
    """The bytes of each folder or file in site-packages."""
    found: Counter[str] = Counter()
    for path in packages.rglob("*"):
        if path.is_file() and not path.is_symlink():
            found[path.relative_to(packages).parts[0]] += path.stat().st_size
    return found


def main(environment: str) -> None:
    (packages,) = Path(environment).glob("lib/python*/site-packages")
    before = sizes(packages)
    slim(packages)
    after = sizes(packages)
    for name, size in after.most_common(12):
        print(f"{size / 1e6:8.1f} MB of {before[name] / 1e6:6.1f}  {name}")
    print(f"{after.total() / 1e6:8.1f} MB of {before.total() / 1e6:6.1f}  altogether")


if __name__ == "__main__":
    main(*sys.argv[1:])
