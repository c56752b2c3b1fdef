// The shared memory of a block of `products_many.cu`: packed bytes of weights as they arrive, and
// the tiles made of these and the activations, which the matrix units read.

#define PITCH 144     // bytes of a row of a tile of bf16: 64 and 8 more, so that rows meet different banks
#define SEGMENT 2048  // ids that are looked at for one list

// A block's tile: rows of weights, and units of a step. A thread has half of a unit of a row; four
// threads have one unit of a row of activations.
template <int M>
struct Tile;
template <>
struct Tile<128> {
  enum { N = 128, UNITS = 1, THREADS = 256 };
};
template <>
struct Tile<32> {
  enum { N = 32, UNITS = 2, THREADS = 128 };
};

// The copies of packed bytes of weights.
template <int T, int M>
struct Raw {
  enum {
    // Units of a row that are copied at once: a step's, and those of a whole number of blocks.
    WHOLE = Stored<T>::PARTS <= 2 ? 2 : 4,
    UNITS = Narrow<T>::IS ? Tile<M>::UNITS : WHOLE,
    BYTES = UNITS * 2 * Stored<T>::BYTES / Stored<T>::PARTS,
    // With the bytes before, up to an odd multiple of 16.
    CHUNKS = (BYTES + 14 + 15) / 16,
    ROOM = (CHUNKS | 1) * 16,
    STAGES = M == 128 || Narrow<T>::IS ? 2 : 4,  // that are there or on their way
    // The alignment that `decode` needs.
    WIDE = Narrow<T>::IS || T == Q4_K || T == Q5_K || T == Q5_1,
    HALVES = T == Q3_K || T == Q6_K || T == TQ1_0 || T == TQ2_0 || T == NVFP4 || OfGrid<T>::IS,
    ALIGNMENT = WIDE ? 16
    : HALVES         ? 2
    : T == MXFP4     ? 1
                     : 4 << (T == Q4_1)
  };
};

// The parts of a unit of weights.
template <int T>
struct Parts {
  enum {
    LEAST = T == Q4_1 || T == Q5_1 || T == Q2_K || T == Q4_K || T == Q5_K,  // offsets of its own
    SPANS = Narrow<T>::IS ? 1 : Form<T>::SPANS,
    PLANES = T == F16 ? 2 : 1
  };
};

// The layout of a block's shared memory: twice a step's units, and the data that exists once.
template <int T, int M>
struct Places {
  enum {
    N = Tile<M>::N,
    WEIGHTS = 0,
    UPPER = WEIGHTS + Parts<T>::PLANES * N * PITCH,
    LOWER = UPPER + M * PITCH,
    FACTORS = LOWER + M * PITCH,
    OFFSETS = FACTORS + Parts<T>::SPANS * N * 4,
    SUMS = OFFSETS + (Parts<T>::LEAST ? Parts<T>::SPANS * N * 4 : 0),
    UNIT_BYTES = SUMS + (Parts<T>::LEAST ? 4 * M * 4 : 0),
    STEP_BYTES = Tile<M>::UNITS * UNIT_BYTES,
    RAW = 2 * STEP_BYTES,
    RAW_BYTES = N * Raw<T, M>::ROOM,
    ROWS = RAW + Raw<T, M>::STAGES * RAW_BYTES,  // addresses of rows of x, then of the result; 0: none
    LIST = ROWS + 2 * M * 8,
    COUNT = LIST + SEGMENT * 2,
    END = COUNT + 16
  };
};

// Weights

template <int T, int M>
static __device__ __forceinline__ void fetch_raw(
    const ProductParameters& p, const u8* weights, i64 first, i64 stage, u8* to) {
  using R = Raw<T, M>;
  // The number of threads for a row.
  constexpr int EACH = Tile<M>::THREADS / Tile<M>::N;
  i64 row = first + threadIdx.x / EACH, start = stage * R::BYTES;
  i64 left = p.k / 32 / Stored<T>::PARTS * Stored<T>::BYTES - start;
  const u8* from = weights + row * p.weight_stride + start;
  const u8* nowhere = weights - (u64)weights % 16;
  const int skew = (int)((u64)from % 16), own = threadIdx.x % EACH * 16;
  const int there = row < p.n ? (int)(left < R::BYTES ? left : R::BYTES) + skew - own : 0;
  SharedPlace place = shared_place(to) + threadIdx.x / EACH * R::ROOM + own;
  from += own - skew;
#pragma unroll
  for (int at = 0; at < R::CHUNKS * 16; at += EACH * 16) {
    int bytes = there - at < 0 ? 0 : there - at < 16 ? there - at : 16;
    if (at + own < R::CHUNKS * 16) copy_later(place + at, bytes ? from + at : nowhere, bytes);
  }
}

// The offset of a row in its room.
template <int T, int M>
static __device__ __forceinline__ int skew_of(
    const ProductParameters& p, const u8* weights, i64 row, i64 stage) {
  return (int)((u64)(weights + row * p.weight_stride + stage * Raw<T, M>::BYTES) % 16);
}

// For rows that are not aligned for `decode`.
template <int T, int M>
static __device__ __forceinline__ void move_raw(
    const ProductParameters& p, const u8* weights, i64 first, i64 stage, u8* raw) {
  using R = Raw<T, M>;
  for (int row = threadIdx.x / 32; row < Tile<M>::N; row += Tile<M>::THREADS / 32) {
    int skew = skew_of<T, M>(p, weights, first + row, stage);
    if (skew % R::ALIGNMENT) move_down(raw + row * R::ROOM, skew, R::BYTES, threadIdx.x % 32);
  }
}

// Two bytes of a word as bf16, minus their excess: 128 + n has n in its lowest bits.
template <int T>
static __device__ __forceinline__ u32 two_numbers(u32 word, int which) {
  u32 pair = bytes_of(word, 0x43434343, which ? 0x4342 : 0x4140);
  if (!Form<T>::SIGNED) {
    // -128 - TOO_LARGE: 0xc300 is -128, and each increment adds one.
    const u32 less = 0xc300 + Form<T>::TOO_LARGE;
    return add_narrow<BF16>(pair, less << 16 | less);
  }
  // Signed: the highest bit is worth -128, and -256 is 0xc380.
  return add_narrow<BF16>(pair & 0xff7fff7f, (pair & 0x00800080) | 0xc300c300);
}

// Half of a unit of a row: two groups. `raw`: the row's blocks that contain the unit, or the
// elements of narrow floats.
template <int T, int M, int HALF>
static __device__ __forceinline__ void stage_half(const u8* raw, int unit, int row, u8* to) {
  using At = Places<T, M>;
  u8* numbers_at = to + At::WEIGHTS + row * PITCH + HALF * 64;
  if constexpr (Narrow<T>::IS) {
#pragma unroll
    for (int i = 0; i < 4; i++) {
      u32 words[4], rest[4];
      load_words<4>(raw + unit * 128 + HALF * 64 + i * 16, words);
      if constexpr (T == F16) {
#pragma unroll
        for (int j = 0; j < 4; j++) {
          float first = low_half(words[j]), second = high_half(words[j]);
          words[j] = f32_pair_to_bf16(first, second);
          float first_rest = first - __int_as_float((int)(words[j] << 16));
          float second_rest = second - __int_as_float((int)(words[j] & 0xffff0000u));
          // Infinity minus itself is not its rounding error.
          rest[j] = f32_pair_to_bf16(
              first_rest == first_rest ? first_rest : 0.0f, second_rest == second_rest ? second_rest : 0.0f);
        }
        store_words(numbers_at + At::N * PITCH + i * 16, rest[0], rest[1], rest[2], rest[3]);
      }
      store_words(numbers_at + i * 16, words[0], words[1], words[2], words[3]);
    }
  } else {
    constexpr int SPANS = Form<T>::SPANS;
    u32 numbers[16];
    float factors[SPANS], offsets[SPANS];
    decode<T>(raw, unit, numbers, factors, offsets);
#pragma unroll
    for (int i = HALF * 8; i < HALF * 8 + 8; i += 2)
      store_words(
          numbers_at + (i - HALF * 8) * 8, two_numbers<T>(numbers[i], 0), two_numbers<T>(numbers[i], 1),
          two_numbers<T>(numbers[i + 1], 0), two_numbers<T>(numbers[i + 1], 1));
#pragma unroll
    for (int s = HALF * SPANS / 2; s < (HALF + 1) * SPANS / 2; s++) {
      reinterpret_cast<float*>(to + At::FACTORS)[s * At::N + row] = factors[s];
      if (Parts<T>::LEAST) reinterpret_cast<float*>(to + At::OFFSETS)[s * At::N + row] = offsets[s];
    }
  }
}

// A step's units of weights, from the bytes of their stage. A thread has half of a unit of a row.
template <int T, int M>
static __device__ __forceinline__ void stage_weights(
    const ProductParameters& p, const u8* weights, i64 first, int step, bool moved, const u8* raw, u8* to) {
  using R = Raw<T, M>;
  constexpr int N = Tile<M>::N;
  const int row = threadIdx.x % N, own = threadIdx.x / N % Tile<M>::UNITS, unit = step * Tile<M>::UNITS + own;
  int skew = skew_of<T, M>(p, weights, first + row, unit / R::UNITS);
  if (moved && skew % R::ALIGNMENT) skew = 0;
  raw += row * R::ROOM + skew, to += own * Places<T, M>::UNIT_BYTES;
  if (threadIdx.x < Tile<M>::THREADS / 2)
    stage_half<T, M, 0>(raw, unit % R::UNITS, row, to);
  else
    stage_half<T, M, 1>(raw, unit % R::UNITS, row, to);
}

// Activations: a thread has four times eight elements of a step.

template <int T>
static __device__ __forceinline__ i64 element_of_eight(int unit, int eighth) {
  return (Narrow<T>::IS ? unit * UNIT + eighth / 2 * 16 : element_of<T>(unit, eighth / 2)) + eighth % 2 * 8;
}

// The index of the eight elements: of a row, and within the step.
template <int M>
struct Eight {
  int row, eighth;
  __device__ __forceinline__ explicit Eight(int j) {
    int i = threadIdx.x + j * Tile<M>::THREADS;
    row = i / (8 * Tile<M>::UNITS), eighth = i % (8 * Tile<M>::UNITS);
  }
};

template <int T, int M>
static __device__ __forceinline__ void load_activations(
    const ProductParameters& p, int step, const u64* rows, u32 (&bits)[4][8]) {
#pragma unroll
  for (int j = 0; j < 4; j++) {
    const Eight<M> at(j);
    i64 first = element_of_eight<T>(step * Tile<M>::UNITS + at.eighth / 8, at.eighth % 8);
    u64 row = rows[at.row], from = row + first * 4;
    bool there = row && first < p.k;
    if (there && from % 16 == 0) {
      load_words<4>(reinterpret_cast<const u8*>(from), bits[j]);
      load_words<4>(reinterpret_cast<const u8*>(from + 16), bits[j] + 4);
    } else {
#pragma unroll
      for (int e = 0; e < 8; e++) bits[j][e] = there ? reinterpret_cast<const u32*>(from)[e] : 0;
    }
  }
}

template <int T, int M>
static __device__ __forceinline__ void stage_activations(u32 (&bits)[4][8], u8* to) {
  using At = Places<T, M>;
#pragma unroll
  for (int j = 0; j < 4; j++) {
    const Eight<M> at(j);
    u32 upper[4], lower[4], most = 0;
    float sum = 0.0f;
#pragma unroll
    for (int e = 0; e < 4; e++) {
      float first = __int_as_float((int)bits[j][2 * e]), second = __int_as_float((int)bits[j][2 * e + 1]);
      upper[e] = f32_pair_to_bf16(first, second);
      lower[e] = f32_pair_to_bf16(
          first - __int_as_float((int)(upper[e] << 16)),
          second - __int_as_float((int)(upper[e] & 0xffff0000u)));
      sum += first + second;
      u32 one = bits[j][2 * e] & 0x7fffffff, other = bits[j][2 * e + 1] & 0x7fffffff;
      most = one > most ? one : most, most = other > most ? other : most;
    }
    // A number that is or becomes infinite has no rounding error.
    if (most >= 0x7f7f8000u)
#pragma unroll
      for (int e = 0; e < 4; e++) {
        if ((upper[e] & 0x7f80) == 0x7f80) lower[e] &= 0xffff0000u;
        if ((upper[e] >> 16 & 0x7f80) == 0x7f80) lower[e] &= 0xffff;
      }
    u8* unit = to + at.eighth / 8 * At::UNIT_BYTES;
    u8* place = unit + At::UPPER + at.row * PITCH + at.eighth % 8 * 16;
    store_words(place, upper[0], upper[1], upper[2], upper[3]);
    store_words(place + M * PITCH, lower[0], lower[1], lower[2], lower[3]);
    if (Parts<T>::LEAST) {
      sum += __shfl_xor_sync(FULL_WARP, sum, 1);
      if (Parts<T>::SPANS == 2) sum += __shfl_xor_sync(FULL_WARP, sum, 2);
      const int each = 8 / Parts<T>::SPANS;
      float* sums = reinterpret_cast<float*>(unit + At::SUMS);
      if (at.eighth % each == 0) sums[at.eighth % 8 / each * M + at.row] = sum;
    }
  }
}
