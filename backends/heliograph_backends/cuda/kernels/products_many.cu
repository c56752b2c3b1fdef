// Products of many rows with stored weights, on the matrix units.
//
// A block has a tile of M rows of activations and so many rows of weights, and goes along k by units of 64: large tiles
// by one, small ones by two, each of which has warps of its own. Weights are whole numbers in bf16, which is exact;
// activations two bf16 each, the second what the first one rounded off: 16 bits, with f32's range. Products are summed
// in f32 over the elements that share a factor, then times the factor, and plus the offset times the sum of the
// activations, where there is one. Narrow floats are factors of nothing: bf16 as they are, f16 as two bf16 that are
// exact, without the product of the two lower parts.
//
// Everything is there twice: while the matrix units have one unit, the next is decoded, its activations are split, and
// the packed bytes and activations of those behind are on their way. Four warps of eight multiply first and stage then,
// the others the other way around, so that each scheduler has both to do. There is one barrier for a unit. Of experts,
// the rows are those whose ids name the block's expert, as they are found.

#define PITCH 144  // bytes of a row of a tile of bf16: 64 and 8 more, so that rows meet different banks
#define SEGMENT 2048  // ids that are looked at for one list

// A block's tile: rows of weights, units of a step. A thread has half of a unit of a row, four threads one of a row of
// activations.
template <int M> struct Tile;
template <> struct Tile<128> { enum { N = 128, UNITS = 1, THREADS = 256 }; };
template <> struct Tile<32> { enum { N = 32, UNITS = 2, THREADS = 128 }; };

// How packed bytes of weights come.
template <int T, int M> struct Raw {
  enum {
    // Units of a row that are fetched at once: a step's, and those of a whole number of blocks.
    UNITS = Narrow<T>::IS ? Tile<M>::UNITS : Stored<T>::PARTS == 1 ? 2 : 4,
    BYTES = UNITS * 2 * Stored<T>::BYTES / Stored<T>::PARTS,
    // With the bytes before, up to a multiple of 16 that is odd.
    CHUNKS = (BYTES + 14 + 15) / 16,
    ROOM = (CHUNKS | 1) * 16,
    STAGES = M == 128 || Narrow<T>::IS ? 2 : 4,  // that are there or on their way
    // The multiple at which `decode` reads.
    ALIGNMENT = Narrow<T>::IS || T == Q4_K || T == Q5_K || T == Q5_1 ? 16 : T == Q4_1 ? 8 : T == Q3_K || T == Q6_K ? 2 : 4
  };
};

// What a unit of weights has.
template <int T> struct Parts {
  enum {
    LEAST = T == Q4_1 || T == Q5_1 || T == Q2_K || T == Q4_K || T == Q5_K,  // offsets of its own
    SPANS = Narrow<T>::IS ? 1 : Form<T>::SPANS,
    PLANES = T == F16 ? 2 : 1
  };
};

// Where things are in a block's shared memory: two times a step's units, and what is there once.
template <int T, int M> struct Places {
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
static __device__ __forceinline__ void fetch_raw(const ProductParameters& p, const u8* weights, i64 first, i64 stage, u8* to) {
  using R = Raw<T, M>;
  // So many threads have a row.
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
    if (at + own < R::CHUNKS * 16) fetch_later(place + at, bytes ? from + at : nowhere, bytes);
  }
}

// Bytes that a row begins behind its room's.
template <int T, int M>
static __device__ __forceinline__ int skew_of(const ProductParameters& p, const u8* weights, i64 row, i64 stage) {
  return (int)((u64)(weights + row * p.weight_stride + stage * Raw<T, M>::BYTES) % 16);
}

// For rows that lie where `decode` cannot read them.
template <int T, int M>
static __device__ __forceinline__ void move_raw(const ProductParameters& p, const u8* weights, i64 first, i64 stage, u8* raw) {
  using R = Raw<T, M>;
  for (int row = threadIdx.x / 32; row < Tile<M>::N; row += Tile<M>::THREADS / 32) {
    int skew = skew_of<T, M>(p, weights, first + row, stage);
    if (skew % R::ALIGNMENT) move_down(raw + row * R::ROOM, skew, R::BYTES, threadIdx.x % 32);
  }
}

// Two bytes as bf16, less what they are too large by: 128 + n has n in its lowest bits. `which`: 0 or 1, of four.
template <int T>
static __device__ __forceinline__ u32 two_numbers(u32 word, int which) {
  u32 pair = bytes_of(word, 0x43434343, which ? 0x4342 : 0x4140);
  if (!Form<T>::SIGNED) {
    // -128 - TOO_LARGE: 0xc300 is -128, and every number more adds one.
    const u32 less = 0xc300 + Form<T>::TOO_LARGE;
    return add_bf16_pairs(pair, less << 16 | less);
  }
  // Signed: the highest bit is worth -128, and -256 is 0xc380.
  return add_bf16_pairs(pair & 0xff7fff7f, (pair & 0x00800080) | 0xc300c300);
}

// Half of a unit of a row: two groups. `raw`: the row's blocks, of which the unit is one; narrow floats' own.
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
          words[j] = bf16_pair(first, second);
          float first_rest = first - __int_as_float((int)(words[j] << 16));
          float second_rest = second - __int_as_float((int)(words[j] & 0xffff0000u));
          // Infinity less itself is not what is left of it.
          rest[j] = bf16_pair(first_rest == first_rest ? first_rest : 0.0f, second_rest == second_rest ? second_rest : 0.0f);
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
      store_words(numbers_at + (i - HALF * 8) * 8, two_numbers<T>(numbers[i], 0), two_numbers<T>(numbers[i], 1),
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

// Which eight: of a row, and of the eights of a step.
template <int M> struct Eight {
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
      load_words<4>(reinterpret_cast<const u8*>(from), bits[j]), load_words<4>(reinterpret_cast<const u8*>(from) + 16, bits[j] + 4);
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
      upper[e] = bf16_pair(first, second);
      lower[e] = bf16_pair(first - __int_as_float((int)(upper[e] << 16)), second - __int_as_float((int)(upper[e] & 0xffff0000u)));
      sum += first + second;
      u32 one = bits[j][2 * e] & 0x7fffffff, other = bits[j][2 * e + 1] & 0x7fffffff;
      most = one > most ? one : most, most = other > most ? other : most;
    }
    // What is or becomes infinite has nothing left.
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

// Products: warps have 32 rows, and of large tiles 64 columns, of small ones 16 of a unit of their own. A sum takes long
// to be there, so several are on their way.

template <int M> struct Warp {
  enum { ACROSS = 2, TILES = Tile<M>::N / ACROSS / 8, AT_ONCE = TILES < 4 ? TILES : 4 };
  int row, column, unit;
  __device__ __forceinline__ Warp() {
    int warp = threadIdx.x / 32;
    row = M == 128 ? warp / 2 * 32 : 0, unit = M == 128 ? 0 : warp / 2, column = warp % 2 * (TILES * 8);
  }
};

template <int T, int M>
static __device__ __forceinline__ void multiply_unit(const u8* tile, float (&d)[2][Warp<M>::TILES][4]) {
  using At = Places<T, M>;
  constexpr int SPANS = Parts<T>::SPANS, NS = Warp<M>::AT_ONCE, N = At::N;
  const Warp<M> own;
  const int lane = threadIdx.x % 32, g = lane / 4, t = lane % 4, first_row = own.row, first_n = own.column;
  tile += own.unit * At::UNIT_BYTES;
  const SharedPlace place = shared_place(tile);
  const SharedPlace a_place = place + At::UPPER + (first_row + lane % 16) * PITCH + lane / 16 * 16;
  const SharedPlace b_place = place + At::WEIGHTS + (first_n + lane % 8) * PITCH + lane / 8 * 16;
  const u8* factors = tile + At::FACTORS + (first_n + 2 * t) * 4;
  const u8* offsets = tile + At::OFFSETS + (first_n + 2 * t) * 4;
  const float* sums = reinterpret_cast<const float*>(tile + At::SUMS) + first_row + g;
#pragma unroll 1
  for (int half = 0; half < 2; half++) {
    u32 upper[2][2][4], lower[2][2][4];
#pragma unroll
    for (int m = 0; m < 2; m++)
#pragma unroll
      for (int k = 0; k < 2; k++) {
        load_matrices(a_place + m * 16 * PITCH + half * 64 + k * 32, upper[m][k]);
        load_matrices(a_place + M * PITCH + m * 16 * PITCH + half * 64 + k * 32, lower[m][k]);
      }
#pragma unroll
    for (int first = 0; first < Warp<M>::TILES; first += NS) {
      u32 b[NS][4], rest[NS][4];
#pragma unroll
      for (int n = 0; n < NS; n++) {
        load_matrices(b_place + (first + n) * 8 * PITCH + half * 64, b[n]);
        if (T == F16) load_matrices(b_place + (N + (first + n) * 8) * PITCH + half * 64, rest[n]);
      }
      if constexpr (Narrow<T>::IS) {
#pragma unroll
        for (int k = 0; k < 2; k++)
#pragma unroll
          for (int part = 0; part < (T == F16 ? 3 : 2); part++)
#pragma unroll
            for (int n = 0; n < NS; n++)
#pragma unroll
              for (int m = 0; m < 2; m++) {
                const u32* column = part == 2 ? rest[n] : b[n];
                multiply_bf16(d[m][first + n], part == 0 ? lower[m][k] : upper[m][k], column[2 * k], column[2 * k + 1]);
              }
      } else {
        constexpr int EACH = 4 / SPANS;  // groups, that is sixteens of k
#pragma unroll
        for (int s = 0; s < SPANS / 2; s++) {
          const int span = half * (SPANS / 2) + s;
          float c[2][NS][4] = {};
#pragma unroll
          for (int k = s * EACH; k < (s + 1) * EACH; k++)
#pragma unroll
            for (int part = 0; part < 2; part++)
#pragma unroll
              for (int n = 0; n < NS; n++)
#pragma unroll
                for (int m = 0; m < 2; m++)
                  multiply_bf16(c[m][n], part == 0 ? lower[m][k] : upper[m][k], b[n][2 * k], b[n][2 * k + 1]);
#pragma unroll
          for (int n = 0; n < NS; n++) {
            const int at = (span * N + (first + n) * 8) * 4;
            u32 factor[2], offset[2];
            load_words<2>(factors + at, factor);
            if (Parts<T>::LEAST) load_words<2>(offsets + at, offset);
#pragma unroll
            for (int m = 0; m < 2; m++)
#pragma unroll
              for (int i = 0; i < 4; i++) {
                float& sum = d[m][first + n][i];
                sum += __int_as_float((int)factor[i % 2]) * c[m][n][i];
                if (Parts<T>::LEAST) sum += __int_as_float((int)offset[i % 2]) * sums[span * M + m * 16 + i / 2 * 8];
              }
          }
        }
      }
    }
  }
}

// Rows

// The rows of a block: M of a matrix, or those that want an expert, M at a time.
template <int T, int M> struct Rows {
  i64 next;   // of the ids, the first that was not looked at
  int taken;  // of the list
  int listed;
  i64 segment;
};

// Writes where the next rows are; false when there are none left. All threads of the block come.
template <int T, int M>
static __device__ __forceinline__ bool take_rows(const ProductParameters& p, const Matrices& at, Rows<T, M>& rows, u8* shared) {
  using At = Places<T, M>;
  u64* addresses = reinterpret_cast<u64*>(shared + At::ROWS);
  __syncthreads();
  if (!p.ids.address) {
    i64 first = (i64)blockIdx.y * M;
    if (rows.next) return false;
    rows.next = 1;
    for (int i = threadIdx.x; i < M; i += Tile<M>::THREADS) {
      bool there = first + i < p.rows;
      addresses[i] = there ? (u64)(at.x + (first + i) * p.x_stride) : 0;
      addresses[M + i] = there ? (u64)(at.result + (first + i) * p.result_stride) : 0;
    }
    __syncthreads();
    return true;
  }
  u16* list = reinterpret_cast<u16*>(shared + At::LIST);
  int* count = reinterpret_cast<int*>(shared + At::COUNT);
  while (rows.taken >= rows.listed) {
    if (rows.next >= p.rows) return false;
    rows.segment = rows.next, rows.next += SEGMENT, rows.taken = 0;
    if (threadIdx.x == 0) *count = 0;
    __syncthreads();
    for (int i = threadIdx.x; i < SEGMENT && rows.segment + i < p.rows; i += Tile<M>::THREADS) {
      i64 number = rows.segment + i, expert = p.id_step ? id_at(p, number * p.id_step) : find(p, number).expert;
      is_there(p, expert, blockIdx.x == 0 && blockIdx.y == 0);
      // In any order: a row has the same bits wherever it is in a tile.
      if (expert == blockIdx.y) list[atomicAdd(count, 1)] = (u16)i;
    }
    __syncthreads();
    rows.listed = *count;
  }
  for (int i = threadIdx.x; i < M; i += Tile<M>::THREADS) {
    bool there = rows.taken + i < rows.listed;
    Matrices found = find(p, rows.segment + (there ? list[rows.taken + i] : 0));
    addresses[i] = there ? (u64)found.x : 0;
    addresses[M + i] = there ? (u64)found.result : 0;
  }
  rows.taken += M;
  __syncthreads();
  return true;
}

// Adds the sums of the other units' warps, in the order of the units. All threads of the block come.
template <int M>
static __device__ __forceinline__ void join_units(float* shared, float (&d)[2][Warp<M>::TILES][4]) {
  constexpr int EACH = 2 * Warp<M>::TILES * 4;
  const Warp<M> own;
  float* place = shared + threadIdx.x % 64;
  __syncthreads();
  if (own.unit)
#pragma unroll
    for (int i = 0; i < EACH; i++) place[((own.unit - 1) * EACH + i) * 64] = d[i / 4 % 2][i / 8][i % 4];
  __syncthreads();
#pragma unroll
  for (int unit = 1; unit < Tile<M>::UNITS; unit++)
#pragma unroll
    for (int i = 0; i < EACH; i++)
      if (!own.unit) d[i / 4 % 2][i / 8][i % 4] += place[((unit - 1) * EACH + i) * 64];
}

template <int M>
static __device__ __forceinline__ void write_tile(
    const ProductParameters& p, const u64* results, i64 first_n, const float (&d)[2][Warp<M>::TILES][4]) {
  const Warp<M> own;
  const int lane = threadIdx.x % 32, first_row = own.row + lane / 4;
  if (own.unit) return;
  first_n += own.column + lane % 4 * 2;
#pragma unroll
  for (int m = 0; m < 2; m++)
#pragma unroll
    for (int i = 0; i < 4; i += 2) {
      float* row = reinterpret_cast<float*>(results[first_row + m * 16 + i / 2 * 8]);
      if (!row) continue;
#pragma unroll
      for (int n = 0; n < Warp<M>::TILES; n++)
#pragma unroll
        for (int j = 0; j < 2; j++)
          if (first_n + n * 8 + j < p.n) row[first_n + n * 8 + j] = d[m][n][i + j];
    }
}

template <int T, int M>
static __device__ __forceinline__ void many_rows(const ProductParameters& p) {
  using At = Places<T, M>;
  using R = Raw<T, M>;
  constexpr int STAGES = R::STAGES;
  DYNAMIC_SHARED(u8, shared);
  Matrices at = find(p, p.ids.address ? 0 : blockIdx.z);
  if (p.ids.address) at.weights += blockIdx.y * p.expert_stride;
  const u64* addresses = reinterpret_cast<const u64*>(shared + At::ROWS);
  const i64 first_n = (i64)blockIdx.x * At::N;
  const int steps = (int)((p.k + UNIT * Tile<M>::UNITS - 1) / (UNIT * Tile<M>::UNITS));
  // Of a stage, and all.
  constexpr int EACH = R::UNITS / Tile<M>::UNITS;
  const int stages = (steps + EACH - 1) / EACH;
  const bool moves = R::ALIGNMENT > 2 && ((u64)at.weights | (u64)p.weight_stride) % 16 != 0;
  const int late = threadIdx.x / (Tile<M>::THREADS / 2);
  auto raw_of = [&](int stage) { return shared + At::RAW + stage % STAGES * At::RAW_BYTES; };
  auto fetch_stage = [&](int stage) {
    if (stage < stages) fetch_raw<T, M>(p, at.weights, first_n, stage, raw_of(stage));
    end_fetches();
  };
  Rows<T, M> rows = {};
  while (take_rows<T, M>(p, at, rows, shared)) {
    float d[2][Warp<M>::TILES][4] = {};
    u32 bits[4][8];
#pragma unroll 1
    for (int stage = 0; stage < STAGES - 1; stage++) fetch_stage(stage);
    load_activations<T, M>(p, 0, addresses, bits);
    // Step -1 is none: what there is to do is staging the first one.
#pragma unroll 1
    for (int step = -1; step < steps; step++) {
      const int next = step + 1, stage = next / EACH;
      // Of stages the next one must be there: behind it are STAGES - 2 at most. Then it is there for all, and nobody
      // reads the other tile any more, nor a stage of which all units were decoded.
      if (next % EACH == 0) await_fetches<STAGES - 2>();
      __syncthreads();
      if (moves && next < steps && next % EACH == 0) {
        move_raw<T, M>(p, at.weights, first_n, stage, raw_of(stage));
        __syncthreads();
      }
      if (next % EACH == 0) fetch_stage(stage + STAGES - 1);
#pragma unroll 1
      for (int turn = 0; turn < 2; turn++) {
        if (turn == late) {
          if (step >= 0) multiply_unit<T, M>(shared + step % 2 * At::STEP_BYTES, d);
        } else if (next < steps) {
          u8* tile = shared + next % 2 * At::STEP_BYTES;
          stage_activations<T, M>(bits, tile);
          load_activations<T, M>(p, next + 1, addresses, bits);
          stage_weights<T, M>(p, at.weights, first_n, next, moves, raw_of(stage), tile);
        }
      }
    }
    await_fetches<0>();
    if (Tile<M>::UNITS > 1) join_units<M>(reinterpret_cast<float*>(shared), d);
    write_tile<M>(p, addresses + M, first_n, d);
  }
}

#define MANY_PRODUCTS(T, name)                                                                  \
  KERNEL_BESIDE(2, product_tiles_##name, ProductParameters, Tile<32>::THREADS) { many_rows<T, 32>(p); } \
  KERNEL_BESIDE(1, product_large_##name, ProductParameters, Tile<128>::THREADS) { many_rows<T, 128>(p); }
MANY_PRODUCTS(F16, f16)
MANY_PRODUCTS(BF16, bf16)
MANY_PRODUCTS(Q4_0, q4_0)
MANY_PRODUCTS(Q4_1, q4_1)
MANY_PRODUCTS(Q5_0, q5_0)
MANY_PRODUCTS(Q5_1, q5_1)
MANY_PRODUCTS(Q8_0, q8_0)
MANY_PRODUCTS(Q2_K, q2_k)
MANY_PRODUCTS(Q3_K, q3_k)
MANY_PRODUCTS(Q4_K, q4_k)
MANY_PRODUCTS(Q5_K, q5_k)
MANY_PRODUCTS(Q6_K, q6_k)
