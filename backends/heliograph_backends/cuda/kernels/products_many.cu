// Products of many rows with stored weights, on the matrix units.
//
// A block has a tile of M rows of activations and N rows of weights, and goes along k by units of
// 64: large tiles by one, small ones by two, each of which has its own warps. Weights are integers
// in bf16, which is exact. Activations are two bf16 each, the second one the rounding error of the
// first: 16 bits, with f32's range. Products are summed in f32 over the elements that share a
// factor, then multiplied by the factor, and increased by the offset, if there is one, times the
// sum of the activations. Narrow floats have no factors: bf16 is unchanged, f16 is two exact bf16,
// without the product of the two lower parts.
//
// All tiles are double-buffered: while the matrix units process one unit, the next one is decoded,
// its activations are split, and the packed bytes and activations of later ones are in flight. Four
// warps of eight multiply first and then stage, the others the reverse, so that each scheduler has
// both kinds of work. There is one barrier for a unit. With experts, the rows are those whose ids
// name the block's expert, in the order in which they are found.

// Products: warps have 32 rows, and with large tiles 64 columns, with small ones 16 of their own
// unit. Sums have a long latency, so several are in flight.

template <int M>
struct Warp {
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
        load_tiles(upper[m][k], a_place + m * 16 * PITCH + half * 64 + k * 32);
        load_tiles(lower[m][k], a_place + M * PITCH + m * 16 * PITCH + half * 64 + k * 32);
      }
#pragma unroll
    for (int first = 0; first < Warp<M>::TILES; first += NS) {
      u32 b[NS][4], rest[NS][4];
#pragma unroll
      for (int n = 0; n < NS; n++) {
        load_tiles(b[n], b_place + (first + n) * 8 * PITCH + half * 64);
        if (T == F16) load_tiles(rest[n], b_place + (N + (first + n) * 8) * PITCH + half * 64);
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
                multiply_narrow<BF16>(
                    d[m][first + n], part == 0 ? lower[m][k] : upper[m][k], column[2 * k], column[2 * k + 1]);
              }
      } else {
        constexpr int EACH = 4 / SPANS;  // groups of 16 of k
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
                  multiply_narrow<BF16>(c[m][n], part == 0 ? lower[m][k] : upper[m][k], b[n][2 * k], b[n][2 * k + 1]);
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
                if (Parts<T>::LEAST)
                  sum += __int_as_float((int)offset[i % 2]) * sums[span * M + m * 16 + i / 2 * 8];
              }
          }
        }
      }
    }
  }
}

// Rows

// The rows of a block: M of a matrix, or those of an expert, M at a time.
template <int T, int M>
struct Rows {
  i64 next;   // the first id that was not checked
  int taken;  // of the list
  int listed;
  i64 segment;
};

// Writes the places of the next rows; false when there are none left. Called by all threads of the
// block.
template <int T, int M>
static __device__ __forceinline__ bool take_rows(
    const ProductParameters& p, const Matrices& at, Rows<T, M>& rows, u8* shared) {
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
      i64 number = rows.segment + i;
      i64 expert = p.id_step ? id_at(p, number * p.id_step) : find(p, number).expert;
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

// Adds the sums of the other units' warps, in the order of the units. Called by all threads of the
// block.
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
  // The bytes of a stage, and of all.
  constexpr int EACH = R::UNITS / Tile<M>::UNITS;
  const int stages = (steps + EACH - 1) / EACH;
  const bool moves = R::ALIGNMENT > 2 && ((u64)at.weights | (u64)p.weight_stride) % 16 != 0;
  const int late = threadIdx.x / (Tile<M>::THREADS / 2);
  auto raw_of = [&](int stage) { return shared + At::RAW + stage % STAGES * At::RAW_BYTES; };
  auto fetch_stage = [&](int stage) {
    if (stage < stages) fetch_raw<T, M>(p, at.weights, first_n, stage, raw_of(stage));
    end_copies();
  };
  Rows<T, M> rows = {};
  while (take_rows<T, M>(p, at, rows, shared)) {
    float d[2][Warp<M>::TILES][4] = {};
    u32 bits[4][8];
#pragma unroll 1
    for (int stage = 0; stage < STAGES - 1; stage++) fetch_stage(stage);
    load_activations<T, M>(p, 0, addresses, bits);
    // Step -1 has no products: it only stages the first one.
#pragma unroll 1
    for (int step = -1; step < steps; step++) {
      const int next = step + 1, stage = next / EACH;
      // The next stage must have arrived: at most STAGES - 2 are after it. After the barrier all
      // warps see it, and no warp reads the other tile, or a stage of which all units were decoded.
      if (next % EACH == 0) await_copies<STAGES - 2>();
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
    await_copies<0>();
    if (Tile<M>::UNITS > 1) join_units<M>(reinterpret_cast<float*>(shared), d);
    write_tile<M>(p, addresses + M, first_n, d);
  }
}

#define MANY_PRODUCTS(T, name)                                                                          \
  KERNEL_OF_BLOCKS(product_tiles_##name, ProductParameters, Tile<32>::THREADS, 2) { many_rows<T, 32>(p); } \
  KERNEL_OF_BLOCKS(product_large_##name, ProductParameters, Tile<128>::THREADS, 1) { many_rows<T, 128>(p); }
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
MANY_PRODUCTS(IQ4_NL, iq4_nl)
MANY_PRODUCTS(IQ4_XS, iq4_xs)
MANY_PRODUCTS(MXFP4, mxfp4)
MANY_PRODUCTS(TQ1_0, tq1_0)
MANY_PRODUCTS(TQ2_0, tq2_0)
MANY_PRODUCTS(IQ1_S, iq1_s)
MANY_PRODUCTS(IQ1_M, iq1_m)
MANY_PRODUCTS(IQ2_XXS, iq2_xxs)
MANY_PRODUCTS(IQ2_XS, iq2_xs)
MANY_PRODUCTS(IQ2_S, iq2_s)
MANY_PRODUCTS(IQ3_XXS, iq3_xxs)
MANY_PRODUCTS(IQ3_S, iq3_s)
MANY_PRODUCTS(NVFP4, nvfp4)
