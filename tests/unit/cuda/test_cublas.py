"""cuBLAS by its C interface: calls arrive as its header declares them, in a library of its names that the
host's compiler makes."""

from __future__ import annotations

import ctypes
import subprocess
from pathlib import Path

import numpy as np
import pytest
from cuda_emulation import why_not

from heliograph_backends.cuda.driver import cublas
from heliograph_backends.cuda.driver.driver import DriverError, Gemm

if why_not():
    pytest.skip(why_not(), allow_module_level=True)

#: Of f32 alone. `seen` is what the last call was told.
SOURCE = """
#include <cstddef>
#include <cstdint>
extern "C" {
struct Seen {
  void* stream;
  void* workspace;
  size_t bytes;
  int types[3], compute, algorithm;
  int64_t batches, calls;
};
Seen seen;
int status = 0;
int cublasCreate_v2(void** handle) { *handle = &seen; return status; }
int cublasDestroy_v2(void* handle) { return handle == &seen ? 0 : 1; }
int cublasSetStream_v2(void* handle, void* stream) {
  seen.stream = stream, seen.workspace = nullptr, seen.bytes = 0;
  return 0;
}
int cublasSetWorkspace_v2(void* handle, void* workspace, size_t bytes) {
  seen.workspace = workspace, seen.bytes = bytes;
  return 0;
}
int cublasGemmStridedBatchedEx_64(void* handle, int turn_a, int turn_b, int64_t m, int64_t n, int64_t k,
                                  const void* alpha, const void* a, int a_type, int64_t lda, long long a_step,
                                  const void* b, int b_type, int64_t ldb, long long b_step, const void* beta,
                                  void* c, int c_type, int64_t ldc, long long c_step, int64_t batches,
                                  int compute, int algorithm) {
  seen.types[0] = a_type, seen.types[1] = b_type, seen.types[2] = c_type;
  seen.compute = compute, seen.algorithm = algorithm, seen.batches = batches, seen.calls++;
  for (int64_t z = 0; z < batches; z++)
    for (int64_t i = 0; i < m; i++)
      for (int64_t j = 0; j < n; j++) {
        const float *x = (const float*)a + z * a_step, *y = (const float*)b + z * b_step;
        float *r = (float*)c + z * c_step + i + j * ldc, sum = *(const float*)beta;
        for (int64_t l = 0; l < k; l++)
          sum += x[turn_a ? l + i * lda : i + l * lda] * y[turn_b ? j + l * ldb : l + j * ldb];
        *r = *(const float*)alpha * sum;
      }
  return status;
}
}
"""


class Seen(ctypes.Structure):
    _fields_ = [
        ("stream", ctypes.c_void_p), ("workspace", ctypes.c_void_p), ("bytes", ctypes.c_size_t),
        ("types", ctypes.c_int * 3), ("compute", ctypes.c_int), ("algorithm", ctypes.c_int),
        ("batches", ctypes.c_int64), ("calls", ctypes.c_int64),
    ]  # fmt: skip


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("cublas")
    (folder / "cublas.cpp").write_text(SOURCE)
    made = folder / "libcublas.so"
    command = ["g++", "-O1", "-shared", "-fPIC", folder / "cublas.cpp", "-o", made]
    subprocess.run(command, check=True, timeout=100)
    return made


@pytest.fixture
def seen(path: Path) -> Seen:
    return Seen.in_dll(ctypes.CDLL(str(path)), "seen")


@pytest.mark.parametrize("most", [65535, 2], ids=["at once", "in parts"])
def test_a_batch_of_products_is_that_of_the_matrices(
    path: Path, seen: Seen, most: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """a is transposed, and matrices lie further apart than they are large."""
    monkeypatch.setattr(cublas, "MOST_BATCH", most)
    random = np.random.default_rng(7)
    a, b = random.random((5, 2, 3), np.float32), random.random((5, 4, 3), np.float32)
    c = np.full((5, 4, 2), np.nan, np.float32)
    library = cublas.Library(str(path))
    handle, before = library.create(), seen.calls
    library.use(handle, 77, 4096, 1024)
    # Columns first: a is [3, 2] transposed to [2, 3], b is [3, 4].
    gemm = Gemm((2, 4, 3), (True, False), ("f32", "f32", "f32"), (3, 3, 2), (6, 12, 8), 5)
    library.multiply(handle, gemm, a.ctypes.data, b.ctypes.data, c.ctypes.data, tf32=False)
    assert np.allclose(c, b @ a.swapaxes(1, 2))
    assert (seen.stream, seen.workspace, seen.bytes) == (77, 4096, 1024)
    assert seen.calls - before == -(-5 // most) and seen.batches == (5 if most > 5 else 1)
    library.destroy(handle)


@pytest.mark.parametrize(
    ("types", "tf32", "numbers", "compute"),
    [
        (("f32", "f32", "f32"), False, [0, 0, 0], 68),
        (("f32", "f32", "f32"), True, [0, 0, 0], 77),
        (("f16", "f16", "f32"), True, [2, 2, 0], 68),
        (("bf16", "bf16", "bf16"), False, [14, 14, 14], 68),
        (("f64", "f64", "f64"), True, [1, 1, 1], 70),
    ],
)
def test_numbers_are_those_of_cudas_headers(
    path: Path, seen: Seen, types: tuple[str, str, str], tf32: bool, numbers: list[int], compute: int
) -> None:
    """Of cudaDataType_t and cublasComputeType_t; of a product that has nothing to compute."""
    library = cublas.Library(str(path))
    library.multiply(library.create(), Gemm((0, 0, 0), (False, False), types, (1, 1, 1)), 0, 0, 0, tf32=tf32)
    assert ([*seen.types], seen.compute, seen.algorithm) == (numbers, compute, -1)


def test_what_cublas_answers_is_an_error_and_no_memory_is_told_apart(path: Path) -> None:
    status = ctypes.c_int.in_dll(ctypes.CDLL(str(path)), "status")
    library = cublas.Library(str(path))
    try:
        for answer, expected in ((3, 2), (13, -1)):
            status.value = answer
            with pytest.raises(DriverError, match=f"status {answer}") as caught:
                library.create()
            assert caught.value.status == expected
    finally:
        status.value = 0
