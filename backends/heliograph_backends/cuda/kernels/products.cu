// Products with stored weights: activations [rows, k] times the transpose of weights [n, k], in f32.
//
// Up to four rows: a warp has some rows of the weights, whose bytes it stages in shared memory; each lane then
// makes 32 elements of two of them f32, in registers. More rows: a block has a tile of 64 x 128 results; 32
// columns of its weights at a time become tf32 in shared memory, for the matrix units.

struct ProductParameters {
  Walk walk;  // of the matrices, by block's z
  i64 n;
  i64 k;
  i64 rows;
  Operand weights;
  Operand x;
  Operand result;
  i64 weight_stride;  // bytes between rows
  i64 x_stride;
  i64 result_stride;
  int block_bytes;
  int parts;  // of 32 elements, of a block
};

#define WARPS 8
#define ROWS_OF_WARP 2
#define FEW 4
// 32 lanes, each with 32 elements.
#define STAGE 1024

// What is done for every type with a name of its own: one kernel has them all, since the type is the same for all
// threads and told once for 32 elements.
#define FOR_TYPE(type, DO)           \
  switch (type) {                    \
    case F16: DO(F16); break;        \
    case BF16: DO(BF16); break;      \
    case Q4_0: DO(Q4_0); break;      \
    case Q4_1: DO(Q4_1); break;      \
    case Q5_0: DO(Q5_0); break;      \
    case Q5_1: DO(Q5_1); break;      \
    case Q8_0: DO(Q8_0); break;      \
    case Q2_K: DO(Q2_K); break;      \
    case Q3_K: DO(Q3_K); break;      \
    case Q4_K: DO(Q4_K); break;      \
    case Q5_K: DO(Q5_K); break;      \
    default: DO(Q6_K);               \
  }

// Words of 4 bytes where rows lie on multiples of 4, as they nearly always do; else of 2.
static __device__ __forceinline__ void stage(const u8* from, i64 bytes, u8* to, int lane) {
  if ((u64)from % 4 == 0) {
    for (int word = lane; word < bytes / 4; word += 32)
      reinterpret_cast<u32*>(to)[word] = reinterpret_cast<const u32*>(from)[word];
    if (bytes % 4 && lane == 0)
      reinterpret_cast<u16*>(to)[bytes / 2 - 1] = reinterpret_cast<const u16*>(from)[bytes / 2 - 1];
  } else {
    for (int half = lane; half < bytes / 2; half += 32)
      reinterpret_cast<u16*>(to)[half] = reinterpret_cast<const u16*>(from)[half];
  }
}

// An activation at [element][row]; 33 instead of 32 so that lanes meet different banks.
#define AT(element, row) ((row) * (STAGE / 32 * 33) + (element) / 32 * 33 + (element) % 32)

// Shared memory: ROWS stages of activations, then for each warp its rows' bytes of a stage.
template <int ROWS>
static __device__ __forceinline__ void few_rows(const ProductParameters& p) {
  DYNAMIC_SHARED(float, xs);
  u8* all_staged = reinterpret_cast<u8*>(xs + ROWS * STAGE / 32 * 33);
  int lane = threadIdx.x % 32, warp = threadIdx.x / 32, stage_bytes = 32 / p.parts * p.block_bytes;
  u8* staged = all_staged + warp * ROWS_OF_WARP * stage_bytes;
  const u8* weights = row_of(p.walk, p.weights, blockIdx.z);
  const u8* x = row_of(p.walk, p.x, blockIdx.z);
  u8* result = row_of(p.walk, p.result, blockIdx.z);
  i64 first = ((i64)blockIdx.x * WARPS + warp) * ROWS_OF_WARP;
  float sums[ROWS_OF_WARP][ROWS];
  for (int w = 0; w < ROWS_OF_WARP; w++)
    for (int r = 0; r < ROWS; r++) sums[w][r] = 0.0f;
  for (i64 start = 0; start < p.k; start += STAGE) {
    __syncthreads();
    for (int i = threadIdx.x; i < ROWS * STAGE; i += WARPS * 32) {
      int row = i / STAGE, element = i % STAGE;
      bool there = row < p.rows && start + element < p.k;
      xs[AT(element, row)] = there ? reinterpret_cast<const float*>(x + row * p.x_stride)[start + element] : 0.0f;
    }
    i64 parts = p.k - start < STAGE ? (p.k - start) / 32 : 32;
    for (int w = 0; w < ROWS_OF_WARP; w++) {
      const u8* row = weights + (first + w) * p.weight_stride + start / 32 / p.parts * p.block_bytes;
      if (first + w < p.n) stage(row, parts / p.parts * p.block_bytes, staged + w * stage_bytes, lane);
    }
    __syncthreads();
    if (lane >= parts) continue;
    // Two rows for each activation that is read. What lies past the last row is not written.
    float one[32], other[32];
#define BOTH(T) part_of<T>(staged, lane, one), part_of<T>(staged + stage_bytes, lane, other)
    FOR_TYPE(p.weights.type, BOTH)
#pragma unroll
    for (int r = 0; r < ROWS; r++)
#pragma unroll
      for (int i = 0; i < 32; i++) {
        float activation = xs[AT(lane * 32 + i, r)];
        sums[0][r] += one[i] * activation;
        sums[1][r] += other[i] * activation;
      }
  }
  for (int w = 0; w < ROWS_OF_WARP; w++)
    for (int r = 0; r < ROWS; r++) {
      float sum = warp_sum(sums[w][r]);
      if (lane == 0 && first + w < p.n && r < p.rows)
        reinterpret_cast<float*>(result + r * p.result_stride)[first + w] = sum;
    }
}

KERNEL(product_one, ProductParameters, WARPS * 32) { few_rows<1>(p); }
KERNEL(product_few, ProductParameters, WARPS * 32) { few_rows<FEW>(p); }

#define TILE_ROWS 64
#define TILE_N 128
#define TILE_K 32
#define PADDED (TILE_K + 4)
#define MANY_THREADS 128

static __device__ __forceinline__ void stage_weights(
    const ProductParameters& p, const u8* weights, i64 first, i64 start, u32* to) {
  // A thread has one row of the tile.
  i64 row = first + threadIdx.x;
  u32* out = to + threadIdx.x * PADDED;
  if (row >= p.n) {
    for (int i = 0; i < TILE_K; i++) out[i] = 0;
    return;
  }
  float values[32];
#define PART(T) part_of<T>(weights + row * p.weight_stride, start / 32, values)
  FOR_TYPE(p.weights.type, PART)
#pragma unroll
  for (int i = 0; i < TILE_K; i++) out[i] = to_tf32(values[i]);
}

static __device__ __forceinline__ void stage_activations(
    const ProductParameters& p, const u8* x, i64 first, i64 start, u32* to) {
  for (int i = threadIdx.x; i < TILE_ROWS * TILE_K; i += MANY_THREADS) {
    i64 row = first + i / TILE_K;
    int column = i % TILE_K;
    float value = row < p.rows ? reinterpret_cast<const float*>(x + row * p.x_stride)[start + column] : 0.0f;
    to[i / TILE_K * PADDED + column] = to_tf32(value);
  }
}

KERNEL(product_many, ProductParameters, MANY_THREADS) {
  __shared__ u32 xs[TILE_ROWS * PADDED];
  __shared__ u32 ws[TILE_N * PADDED];
  int lane = threadIdx.x % 32, warp = threadIdx.x / 32, g = lane / 4, t = lane % 4;
  const u8* weights = row_of(p.walk, p.weights, blockIdx.z);
  const u8* x = row_of(p.walk, p.x, blockIdx.z);
  u8* result = row_of(p.walk, p.result, blockIdx.z);
  i64 first_row = (i64)blockIdx.y * TILE_ROWS, first_n = (i64)blockIdx.x * TILE_N;
  float d[4][4][4] = {};
  for (i64 start = 0; start < p.k; start += TILE_K) {
    __syncthreads();
    stage_weights(p, weights, first_n, start, ws);
    stage_activations(p, x, first_row, start, xs);
    __syncthreads();
#pragma unroll 1
    for (int k = 0; k < TILE_K; k += 8) {
      u32 a[4][4], b[4][2];
#pragma unroll
      for (int m = 0; m < 4; m++) {
        const u32* place = xs + (m * 16 + g) * PADDED + k + t;
        a[m][0] = place[0], a[m][1] = place[8 * PADDED], a[m][2] = place[4], a[m][3] = place[8 * PADDED + 4];
      }
#pragma unroll
      for (int n = 0; n < 4; n++) {
        const u32* place = ws + (warp * 32 + n * 8 + g) * PADDED + k + t;
        b[n][0] = place[0], b[n][1] = place[4];
      }
#pragma unroll
      for (int m = 0; m < 4; m++)
#pragma unroll
        for (int n = 0; n < 4; n++) multiply_tiles(d[m][n], a[m], b[n]);
    }
  }
#pragma unroll
  for (int m = 0; m < 4; m++)
#pragma unroll
    for (int n = 0; n < 4; n++)
#pragma unroll
      for (int i = 0; i < 4; i++) {
        i64 row = first_row + m * 16 + g + i / 2 * 8, column = first_n + warp * 32 + n * 8 + 2 * t + i % 2;
        if (row < p.rows && column < p.n) reinterpret_cast<float*>(result + row * p.result_stride)[column] = d[m][n][i];
      }
}
