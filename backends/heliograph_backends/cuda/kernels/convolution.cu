// Convolutions as products of matrices that are never made: rows are channels of the result,
// columns its places in all images, and the depth is what a window has: channels times taps.
//
// A block has a tile of M rows and N columns. It walks the depth in steps of 16 words: 16 elements
// of f32, or 32 of narrow floats. Both tiles lie in shared memory with the depth along their lines,
// so that the matrix units' fragments are `load_tiles` of both; lines of 20 words keep eight lines'
// chunks in different banks. f32 has three tf32 products for each, as exact as f32 (see `tiles.cuh`).
//
// Which channel and taps an element of the depth is takes three divisions. One thread for each
// element makes them, a step ahead, for the whole block.

#define LINE_CHUNKS 5  // of 4 words; the last one is never read
#define STEP_CHUNKS 4
#define CLOSING_LINE 33  // so that the items of a column lie in different banks

// An element of the depth: its offsets in the kernel and in a window, and its taps' places.
struct alignas(16) DepthElement {
  i64 kernel, data;
  int at[3], is_there;
};

static __device__ __forceinline__ DepthElement depth_element(const ConvolutionParameters& p, u32 number) {
  DepthElement found;
  found.is_there = number < (u32)p.depth;
  found.kernel = found.data = 0;
#pragma unroll
  for (int axis = 2; axis >= 0; axis--) {
    u32 above = divided(number, p.taps[axis]);
    u32 tap = number - above * p.taps[axis].size;
    found.at[axis] = (int)tap * p.spread[axis], number = above;
    found.kernel += tap * p.kernel_strides[2 + axis], found.data += found.at[axis] * p.data_strides[2 + axis];
  }
  found.kernel += number * p.kernel_strides[1], found.data += number * p.data_strides[1];
  return found;
}

template <int T>
struct Elements {
  // Elements of a word, of a chunk of 4 words and of a step.
  enum { OF_WORD = T == F32 ? 1 : 2, OF_CHUNK = 4 * OF_WORD, OF_STEP = 16 * OF_WORD };

  __device__ __forceinline__ static u32 bits(const u8* place, int type) {
    return T == F32 ? (u32)__float_as_int(load(place, type)) : *reinterpret_cast<const u16*>(place);
  }

  // Puts element `i` into a chunk of zeros.
  __device__ __forceinline__ static void put(Chunk& chunk, int i, u32 bits) {
    chunk.words[i / OF_WORD] |= OF_WORD == 1 ? bits : bits << 16 * (i % 2);
  }

  __device__ __forceinline__ static void multiply(float (&d)[4], const u32 (&a)[4], u32 b0, u32 b1) {
    if constexpr (T == F32)
      multiply_wide(d, a, b0, b1);
    else
      multiply_narrow<T>(d, a, b0, b1);
  }
};

template <int T, int M, int N, int THREADS>
struct ConvolvedTile {
  using E = Elements<T>;
  // Warps stand side by side over 32 columns each, and over M / TALL rows.
  enum { ACROSS = N / 32, TALL = THREADS / 32 / ACROSS, ROWS = M / TALL, TILES = ROWS / 16 };
  // Chunks that a thread fetches for a step.
  enum { KERNEL_CHUNKS = M * STEP_CHUNKS / THREADS, DATA_CHUNKS = N * STEP_CHUNKS / THREADS };

  struct Shared {
    Chunk kernel[2][M][LINE_CHUNKS], data[2][N][LINE_CHUNKS];
    DepthElement depth[2][E::OF_STEP];
  };

  const ConvolutionParameters& p;
  Shared& shared;
  u32 first_row, first_column, group;
  const u8* window;  // of this thread's column, at its first tap; never read outside of the data
  int start[3];
  bool has_column;
  Chunk kernel[KERNEL_CHUNKS], data[DATA_CHUNKS];
  float sums[TILES][4][4];

  __device__ __forceinline__ ConvolvedTile(const ConvolutionParameters& p, Shared& shared) : p(p), shared(shared) {
    u32 above = divided(blockIdx.x, p.row_tiles);
    first_row = (blockIdx.x - above * p.row_tiles.size) * M, first_column = above * N, group = blockIdx.y;
    u32 number = first_column + threadIdx.x % N;
    has_column = number < p.columns;
    Column column = column_of(p, has_column ? number : 0);
    i64 offset = column.image * p.data_strides[0] + (i64)group * p.data_channels * p.data_strides[1];
#pragma unroll
    for (int axis = 0; axis < 3; axis++) {
      start[axis] = column.at[axis] * p.step[axis] - p.padding[axis];
      offset += start[axis] * p.data_strides[2 + axis];
    }
    window = in_memory(p.data) + offset;
#pragma unroll
    for (int i = 0; i < TILES; i++)
#pragma unroll
      for (int j = 0; j < 4; j++)
#pragma unroll
        for (int k = 0; k < 4; k++) sums[i][j][k] = 0.0f;
  }

  __device__ __forceinline__ void find_depth(int step) {
    if (threadIdx.x < E::OF_STEP)
      shared.depth[step % 2][threadIdx.x] = depth_element(p, (u32)step * E::OF_STEP + threadIdx.x);
  }

  // Neighbours have neighbouring chunks of a line of the kernel.
  __device__ __forceinline__ void fetch_kernel(int step) {
    const DepthElement* depth = shared.depth[step % 2];
#pragma unroll
    for (int i = 0; i < KERNEL_CHUNKS; i++) {
      int number = threadIdx.x + i * THREADS, first = number % STEP_CHUNKS * E::OF_CHUNK;
      u32 row = first_row + number / STEP_CHUNKS;
      kernel[i] = Chunk{};
      if (row >= (u32)p.rows) continue;
      const u8* line = in_memory(p.kernel) + ((i64)group * p.rows + row) * p.kernel_strides[0];
      const u8* place = line + depth[first].kernel;
      bool whole = p.packed && depth[first + E::OF_CHUNK - 1].is_there && p.kernel_type == T;
      if (whole && (u64)place % 16 == 0) {
        load_words<4>(place, kernel[i].words);
        continue;
      }
#pragma unroll
      for (int j = 0; j < E::OF_CHUNK; j++)
        if (depth[first + j].is_there)
          E::put(kernel[i], j, E::bits(line + depth[first + j].kernel, p.kernel_type));
    }
  }

  // Neighbours have neighbouring columns: they read neighbouring places, and the same `depth`.
  __device__ __forceinline__ void fetch_data(int step) {
    const DepthElement* depth = shared.depth[step % 2];
#pragma unroll
    for (int i = 0; i < DATA_CHUNKS; i++) {
      int first = (threadIdx.x / N + i * (THREADS / N)) * E::OF_CHUNK;
      data[i] = Chunk{};
#pragma unroll
      for (int j = 0; j < E::OF_CHUNK; j++) {
        const DepthElement& one = depth[first + j];
        bool inside = has_column && one.is_there;
#pragma unroll
        for (int axis = 0; axis < 3; axis++)
          inside = inside && (u32)(start[axis] + one.at[axis]) < (u32)p.sizes[axis];
        if (inside) E::put(data[i], j, E::bits(window + one.data, p.data_type));
      }
    }
  }

  __device__ __forceinline__ void put(int step) {
#pragma unroll
    for (int i = 0; i < KERNEL_CHUNKS; i++) {
      int number = threadIdx.x + i * THREADS;
      shared.kernel[step % 2][number / STEP_CHUNKS][number % STEP_CHUNKS] = kernel[i];
    }
#pragma unroll
    for (int i = 0; i < DATA_CHUNKS; i++)
      shared.data[step % 2][threadIdx.x % N][threadIdx.x / N + i * (THREADS / N)] = data[i];
  }

  __device__ __forceinline__ void multiply(int step) {
    int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
    const Chunk(*rows)[LINE_CHUNKS] = &shared.kernel[step % 2][warp / ACROSS * ROWS + lane % 16];
    const Chunk(*columns)[LINE_CHUNKS] = &shared.data[step % 2][warp % ACROSS * 32 + lane % 16];
#pragma unroll
    for (int part = 0; part < 2; part++) {
      u32 a[TILES][4], b[2][4];
#pragma unroll
      for (int i = 0; i < TILES; i++) load_tiles(a[i], &rows[16 * i][2 * part + lane / 16]);
#pragma unroll
      for (int j = 0; j < 2; j++) load_tiles(b[j], &columns[16 * j][2 * part + lane / 16]);
#pragma unroll
      for (int i = 0; i < TILES; i++)
#pragma unroll
        for (int j = 0; j < 4; j++) E::multiply(sums[i][j], a[i], b[j / 2][j % 2], b[j / 2][2 + j % 2]);
    }
  }

  __device__ __forceinline__ void run() {
    int end = (p.depth + E::OF_STEP - 1) / E::OF_STEP, step = (int)blockIdx.z * p.steps_of_split;
    if (end > step + p.steps_of_split) end = step + p.steps_of_split;
    if (step < end) {
      find_depth(step);
      __syncthreads();  // `depth` of the first step is there
      fetch_kernel(step), fetch_data(step);
      put(step);
      if (step + 1 < end) find_depth(step + 1);
    }
    // Steps use the two halves of shared memory in turn. Each half of the tiles is written after
    // the barrier behind its last `multiply`, and each half of `depth` after the one behind its last
    // fetch, which was a step before.
    for (; step < end; step++) {
      __syncthreads();
      if (step + 1 < end) fetch_kernel(step + 1), fetch_data(step + 1);
      multiply(step);
      if (step + 1 < end) put(step + 1);
      if (step + 2 < end) find_depth(step + 2);
    }
    close();
  }

  // Warps turn their sums in shared memory, so that a lane has a column: 16 rows at a time.
  __device__ __forceinline__ void close() {
    int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
    u32 row = first_row + warp / ACROSS * ROWS, at = first_column + warp % ACROSS * 32 + lane;
    Column column = column_of(p, at < p.columns ? at : 0);
    float(*turned)[CLOSING_LINE] = reinterpret_cast<float(*)[CLOSING_LINE]>(&shared) + warp * 16;
    __syncthreads();  // all warps have read their last tiles, whose memory this is
#pragma unroll
    for (int i = 0; i < TILES; i++) {
#pragma unroll
      for (int j = 0; j < 16; j++)
        turned[lane / 4 + j % 4 / 2 * 8][j / 4 * 8 + lane % 4 * 2 + j % 2] = sums[i][j / 4][j % 4];
      __syncwarp();  // the lanes' sums are there
      int rows = (int)p.rows - (int)row - 16 * i;
#pragma unroll 1
      for (int line = 0; at < p.columns && line < 16 && line < rows; line++)
        keep(column, at, group * p.rows + row + 16 * i + line, turned[line][lane]);
      __syncwarp();  // and read, before the next ones come there
    }
  }

  // The result, or this split's part of it.
  __device__ __forceinline__ void keep(const Column& column, u32 at, u32 channel, float value) {
    if (p.splits == 1) {
      finish(p, column, channel, value);
      return;
    }
    u32 places = p.columns / p.images;
    u32 index = (column.image * p.channels.size + channel) * places + (at - column.image * places);
    reinterpret_cast<float*>(in_memory(p.partial))[(u64)blockIdx.z * p.results + index] = value;
  }
};

template <int T, int M, int N, int THREADS>
static __device__ __forceinline__ void convolve(const ConvolutionParameters& p) {
  using Tile = ConvolvedTile<T, M, N, THREADS>;
  __shared__ typename Tile::Shared shared;
  Tile(p, shared).run();
}

// Mixed types have the kernel of f32, which widens what it loads.
#define CONVOLUTION(T, name)                                                                          \
  KERNEL(convolution_##name##_tiles, ConvolutionParameters, 128) { convolve<T, 64, 64, 128>(p); }      \
  KERNEL(convolution_##name##_large, ConvolutionParameters, 256) { convolve<T, 128, 128, 256>(p); }
CONVOLUTION(F32, f32)
CONVOLUTION(F16, f16)
CONVOLUTION(BF16, bf16)

// Adds the parts of sums in their order.
KERNEL(convolution_merge, ConvolutionParameters, 256) {
  u32 step = gridDim.x * 256;
  for (u64 index = blockIdx.x * 256 + threadIdx.x; index < p.results; index += step) {
    const float* place = reinterpret_cast<const float*>(in_memory(p.partial)) + index;
    float value = place[0];
    for (int split = 1; split < p.splits; split++) value = __fadd_rn(value, place[(u64)split * p.results]);
    Column column = column_of(p, (u32)index);
    u32 image = divided(column.image, p.channels), channel = column.image - image * p.channels.size;
    column.image = image;
    finish(p, column, channel, value);
  }
}
