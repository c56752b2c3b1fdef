// Attention tiles in shared memory: their layout, and the copies of rows of any type to it.

// Rows of D elements as T in shared memory. Rows are an odd number of chunks apart, so that a tile
// uses each bank once.
template <int T, int D> struct Rows {
  enum {
    ITEM = T == F32 ? 4 : 2,
    IN_CHUNK = 16 / ITEM,
    CHUNKS = D / IN_CHUNK,
    BYTES = D * ITEM,
    PITCH = BYTES + 16,
  };
};

template <int T, int D, bool SPLIT> struct Tiling : Rows<T, D> {
  using R = Rows<T, D>;
  enum {
    KEYS = R::BYTES <= 256 ? 64 : R::BYTES <= 512 ? 32 : 16,
    WARPS = SPLIT ? KEYS / 16 : 4,
    THREADS = WARPS * 32,
    TILES = !SPLIT && T != F32 && D <= 64 ? 2 : 1,  // of 16 lines, of a warp
    LINES = SPLIT ? 16 : 64 * TILES,
    OWN_KEYS = SPLIT ? 16 : KEYS,  // of a warp
    STAGE = 2 * KEYS * R::PITCH,
    HELD = R::BYTES <= 256,  // whether queries stay in registers; else they stay in shared memory, behind the stages
    QUERIES = HELD ? 0 : LINES * R::PITCH,
  };
};

// Rows of masks in shared memory, f16 unchanged and others as f32; gaps put lanes at different
// banks.
template <int KEYS> struct MaskRows {
  enum { NARROW_PITCH = KEYS * 2 + 16, WIDE_PITCH = KEYS * 4 + 32 };
};

// 16 bytes of a row as T, from elements of any type.
template <int T>
static __device__ __forceinline__ Chunk converted(const u8* row, int type, int first) {
  constexpr int COUNT = T == F32 ? 4 : 8;
  float values[COUNT];
  if (type == F32) {
#pragma unroll
    for (int i = 0; i < COUNT; i++) values[i] = reinterpret_cast<const float*>(row)[first + i];
  } else if (type == F16 || type == BF16) {
#pragma unroll
    for (int i = 0; i < COUNT; i++) {
      u16 bits = reinterpret_cast<const u16*>(row)[first + i];
      values[i] = type == F16 ? f16_to_f32(bits) : bf16_to_f32(bits);
    }
  } else {  // Q8_0 or Q4_0
    const u8* block = row + first / 32 * (type == Q8_0 ? 34 : 18);
    const u8* quanta = block + 2 + (type == Q8_0 ? first % 32 : first % 16);
    float factor = f16_to_f32(*reinterpret_cast<const u16*>(block));
    int shift = first % 32 / 16 * 4;
#pragma unroll
    for (int i = 0; i < COUNT; i++) {
      int number = type == Q8_0 ? (int)(i8)quanta[i] : (quanta[i] >> shift & 15) - 8;
      values[i] = (float)number * factor;
    }
  }
  Chunk made;
#pragma unroll
  for (int i = 0; i < 4; i++) {
    if constexpr (T == F32)
      made.words[i] = (u32)__float_as_int(values[i]);
    else
      made.words[i] = narrow_pair<T>(values[2 * i], values[2 * i + 1]);
  }
  return made;
}

// Copies ROWS rows, of which `at` returns the addresses, to shared memory; rows from `count` on and
// columns after the last are 0. Copies are asynchronous if types and alignment allow.
template <int T, int D, int ROWS, int THREADS, class At>
static __device__ __forceinline__ void stage_rows(At at, bool chunks, int type, int columns, int count, u8* to) {
  using R = Rows<T, D>;
  constexpr int ALL = ROWS * R::CHUNKS;
  const Chunk nothing = {};
  if (type == T && chunks) {
#pragma unroll 8
    for (int j = 0; j < (ALL + THREADS - 1) / THREADS; j++) {
      int i = j * THREADS + threadIdx.x, row = i / R::CHUNKS, chunk = i % R::CHUNKS;
      if (ALL % THREADS != 0 && i >= ALL) break;
      bool there = row < count && chunk * R::IN_CHUNK < columns;
      copy_later(to + row * R::PITCH + chunk * 16, at(there ? row : 0) + (there ? chunk * 16 : 0), there ? 16 : 0);
    }
    return;
  }
#pragma unroll 1
  for (int i = threadIdx.x; i < ALL; i += THREADS) {
    int row = i / R::CHUNKS, chunk = i % R::CHUNKS;
    bool there = row < count && chunk * R::IN_CHUNK < columns;
    *reinterpret_cast<Chunk*>(to + row * R::PITCH + chunk * 16) =
        there ? converted<T>(at(row), type, chunk * R::IN_CHUNK) : nothing;
  }
}

// The same of rows `stride` bytes apart.
template <int T, int D, int ROWS, int THREADS>
static __device__ __forceinline__ void stage(const u8* from, int stride, int type, int columns, int count, u8* to) {
  auto at = [=](int row) { return from + row * stride; };
  stage_rows<T, D, ROWS, THREADS>(at, ((u64)from | (u64)stride) % 16 == 0, type, columns, count, to);
}

template <int T>
static __device__ __forceinline__ Chunk sum_of(const Chunk& a, const Chunk& b) {
  Chunk sum;
#pragma unroll
  for (int i = 0; i < 4; i++) {
    if constexpr (T == F32)
      sum.words[i] = (u32)__float_as_int(__fadd_rn(__int_as_float((int)a.words[i]), __int_as_float((int)b.words[i])));
    else
      sum.words[i] = add_narrow<T>(a.words[i], b.words[i]);
  }
  return sum;
}

// Adds a row to the part of ROWS rows that this thread staged, after its copies have arrived.
template <int T, int D, int ROWS, int THREADS>
static __device__ __forceinline__ void add_bias(const u8* bias, int columns, int count, u8* to) {
  using R = Rows<T, D>;
  constexpr int ALL = ROWS * R::CHUNKS;
  bool whole = (u64)bias % 16 == 0;
#pragma unroll 4
  for (int j = 0; j < (ALL + THREADS - 1) / THREADS; j++) {
    int i = j * THREADS + threadIdx.x, row = i / R::CHUNKS, column = i % R::CHUNKS * R::IN_CHUNK;
    if (row >= count || column >= columns || (ALL % THREADS != 0 && i >= ALL)) continue;
    Chunk* place = reinterpret_cast<Chunk*>(to + row * R::PITCH + column * R::ITEM);
    const u8* from = bias + column * R::ITEM;
    Chunk more;
    if (whole)
      more = *reinterpret_cast<const Chunk*>(from);
    else
      more = converted<T>(bias, T, column);
    *place = sum_of<T>(*place, more);
  }
}
