"""GGUF files byte by byte: what strangers may put into a folder of models."""

from __future__ import annotations

import struct

from heliograph_proto.gguf import MAX_DEPTH, MAX_ENTRIES, MAX_TENSORS

U32, TEXT, LIST = 4, 8, 9


def text(value: bytes) -> bytes:
    return len(value).to_bytes(8, "little") + value


def entry(key: bytes, kind: int, value: bytes) -> bytes:
    return text(key) + struct.pack("<I", kind) + value


def words(*values: bytes) -> bytes:
    return struct.pack("<IQ", TEXT, len(values)) + b"".join(map(text, values))


def tensor(name: bytes, shape: tuple[int, ...], kind: int = 0, offset: int = 0) -> bytes:
    return text(name) + struct.pack(f"<I{len(shape)}QIQ", len(shape), *shape, kind, offset)


def file_of(
    entries: list[bytes] = [], tensors: list[bytes] = [], data: bytes = b"", version: int = 3  # noqa: B006
) -> bytes:  # fmt: skip
    head = b"GGUF" + struct.pack("<IQQ", version, len(tensors), len(entries))
    head += b"".join(entries) + b"".join(tensors)
    return head + bytes(-len(head) % 32) + data if tensors else head


N = entry(b"n", U32, bytes(4))
#: Files by a part of their refusal.
HOSTILE = {
    "4 bytes go behind the end of the file (start, byte 0)": b"",
    "it begins with b'NOTG', not": b"NOTG" + bytes(40),
    "GGUF version 1; 2 and 3": file_of(version=1),
    "GGUF version 0; 2 and 3": file_of(version=0),
    "big-endian": b"GGUF" + struct.pack(">IQQ", 3, 0, 0),
    "8 bytes go behind the end of the file (start, byte 16)": file_of()[:20],
    f"{2**60} tensors; at most {MAX_TENSORS}": b"GGUF" + struct.pack("<IQQ", 3, 2**60, 0),
    "1000 tensors do not fit": b"GGUF" + struct.pack("<IQQ", 3, 1000, 0),
    f"{2**60} entries; at most {MAX_ENTRIES}": b"GGUF" + struct.pack("<IQQ", 3, 0, 2**60),
    "1000 entries do not fit": b"GGUF" + struct.pack("<IQQ", 3, 0, 1000),
    "(entry 0, byte 32)": file_of([(2**63).to_bytes(8, "little") + bytes(9)]),
    "an empty key": file_of([entry(b"", U32, bytes(4))]),
    "a key that was there before (entry 'n'": file_of([N, N]),
    "a text that is not UTF-8 (entry 0": file_of([entry(b"\xff\xfe", U32, bytes(4))]),
    "a text that is not UTF-8 (entry 't'": file_of([entry(b"t", TEXT, text(b"\xff"))]),
    "a value of type 99": file_of([entry(b"n", 99, bytes(4))]),
    "a truth value of 2": file_of([entry(b"n", 7, b"\2")]),
    "a truth value of 3": file_of([entry(b"n", LIST, struct.pack("<IQ", 7, 2) + b"\0\3")]),
    "a text of 4611686018427387904 bytes": file_of([entry(b"n", TEXT, struct.pack("<Q", 2**62))]),
    "values; at most": file_of([entry(b"n", LIST, struct.pack("<IQ", 0, 2**62))]),
    "1048576 values do not fit": file_of([entry(b"n", LIST, struct.pack("<IQ", TEXT, 2**20))]),
    "go behind the end of the file (entry 'n'": file_of(
        [entry(b"n", LIST, struct.pack("<IQQ", TEXT, 2, 2**40) + bytes(8))]
    ),
    "go behind the end of the file (entry 'big'": file_of(
        [entry(b"big", LIST, struct.pack("<IQQ", TEXT, 1, 2**63))]
    ),
    f"lists in lists, deeper than {MAX_DEPTH}": file_of(
        [entry(b"n", LIST, struct.pack("<IQ", LIST, 1) * 50)]
    ),
    "an alignment of 0": file_of([entry(b"general.alignment", U32, bytes(4))]),
    "an alignment of 33": file_of([entry(b"general.alignment", U32, struct.pack("<I", 33))]),
    "an alignment of 'x'": file_of([entry(b"general.alignment", TEXT, text(b"x"))]),
    "an empty name": file_of(tensors=[tensor(b"", (1,))], data=bytes(4)),
    "2147483648 dimensions": file_of(tensors=[text(b"w") + struct.pack("<I", 2**31)], data=bytes(100)),
    "rows of 31 elements": file_of(tensors=[tensor(b"w", (31,), 2)], data=bytes(100)),
    "the end of the file (tensor 'w', byte 49)": file_of(tensors=[tensor(b"w", (100,))])[:50],
    "400 bytes from byte 64 are outside": file_of(tensors=[tensor(b"w", (100,))], data=bytes(99)),
    "are outside of the file's": file_of(tensors=[tensor(b"w", (2**40, 2**40))], data=bytes(100)),
    "from byte 9223372036854775": file_of(tensors=[tensor(b"w", (1,), 0, 2**63)], data=bytes(100)),
    "it lies at byte 4, which is no multiple of 32": file_of(
        tensors=[tensor(b"w", (1,), 0, 4)], data=bytes(100)
    ),
    "two tensors have this name (tensor 'w'": file_of(
        tensors=[tensor(b"w", (1,)), tensor(b"w", (1,), 0, 32)], data=bytes(100)
    ),
    "it lies on bytes of tensor 'w' (tensor 'v'": file_of(
        tensors=[tensor(b"w", (10,)), tensor(b"v", (1,), 0, 32)], data=bytes(100)
    ),
}  # fmt: skip
