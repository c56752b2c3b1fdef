// Products of few rows with stored weights: activations [rows, k] times the transpose of weights
// [n, k], in f32.
//
// The kernels are bound by the weights' bytes; all other work overlaps their transfer. A
// multiprocessor has one block and a share of the weights' rows. The block first converts the
// activations to fixed-point numbers of 15 bits and a sign in shared memory, two bytes each, with
// one scale for 64 elements. So `dp4a` multiplies four bytes of weights at once, twice, with exact
// sums. Then each warp goes alone, without block barriers, through an equal share of the steps
// (GROUP rows, STEP elements): 16-byte copies bring the bytes of the next two steps to its own ring
// in shared memory while it decodes those of this one. Shares end within rows: the sums of their
// parts meet in shared memory, and are added in the order of the warps. So the bits depend only on
// shapes and the device.
//
// Rows that are not multiples of 16 apart are copied with the bytes before them, and moved in the
// ring. Narrow floats are processed in the same way, with f32 activations.

#define GROUP 2
#define RING 3

// A step of a block's: `step` of a group of rows.
struct Place {
  int group;
  int step;
  __device__ __forceinline__ void advance(int steps) {
    if (++step == steps) step = 0, group++;
  }
};

// Starts the copies of a step to a warp's place in the ring. `from`: the group's first row, at the
// step.
template <int T>
static __device__ __forceinline__ void fetch(
    const u8* from, i64 stride, i64 rows_left, i64 bytes_left, SharedPlace to, int lane, bool aligned) {
  constexpr int BYTES = Step<T>::BYTES, ROOM = Step<T>::ROOM;
  if (aligned && rows_left >= GROUP && bytes_left >= BYTES) {
#pragma unroll
    for (int w = 0; w < GROUP; w++)
#pragma unroll
      for (int at = 0; at < BYTES; at += 512)
        if (at + 512 <= BYTES || at + lane * 16 < BYTES)
          copy_later(to + w * ROOM + at + lane * 16, from + w * stride + at + lane * 16);
    return;
  }
  // Missing bytes are filled with 0, from any valid address.
  const u8* nowhere = from - (u64)from % 16;
#pragma unroll 1
  for (int w = 0; w < GROUP; w++, from += stride, to += ROOM) {
    int skew = (int)((u64)from % 16),
        there = w >= rows_left ? 0 : (int)(bytes_left < BYTES ? bytes_left : BYTES) + skew;
#pragma unroll 1
    for (int own = lane * 16; own < BYTES + skew; own += 512) {
      int bytes = there - own < 0 ? 0 : there - own < 16 ? there - own : 16;
      copy_later(to + own, bytes ? from - skew + own : nowhere, bytes);
    }
  }
}

// A step's part of a lane's sums.
template <int T, int ROWS>
static __device__ __forceinline__ void add_step(
    const u8* ring, const u8* x, i64 plane, int lane, float (&sums)[GROUP][ROWS]) {
  if constexpr (Narrow<T>::IS) {
#pragma unroll
    for (int j = 0; j < 4; j++) {
      float values[GROUP][8];
#pragma unroll
      for (int w = 0; w < GROUP; w++) {
        u32 words[4];
        load_words<4>(ring + w * Step<T>::ROOM + j * 512 + lane * 16, words);
#pragma unroll
        for (int i = 0; i < 4; i++) {
          values[w][2 * i] = T == F16 ? low_half(words[i]) : __int_as_float((int)(words[i] << 16));
          values[w][2 * i + 1] =
              T == F16 ? high_half(words[i]) : __int_as_float((int)(words[i] & 0xffff0000u));
        }
      }
#pragma unroll
      for (int r = 0; r < ROWS; r++) {
        u32 own[8];
        load_words<4>(x + r * plane + j * 1024 + lane * 16, own);
        load_words<4>(x + r * plane + j * 1024 + 512 + lane * 16, own + 4);
#pragma unroll
        for (int w = 0; w < GROUP; w++)
#pragma unroll
          for (int i = 0; i < 8; i++) sums[w][r] += values[w][i] * __int_as_float((int)own[i]);
      }
    }
  } else {
    constexpr int SPANS = Form<T>::SPANS, EACH = 4 / SPANS;
    u32 numbers[GROUP][16];
    float factors[GROUP][SPANS], offsets[GROUP][SPANS];
#pragma unroll
    for (int w = 0; w < GROUP; w++)
      decode<T>(ring + w * Step<T>::ROOM, lane, numbers[w], factors[w], offsets[w]);
#pragma unroll
    for (int r = 0; r < ROWS; r++) {
      const u8* unit = x + r * plane + lane * Step<T>::X_UNIT;
      u32 tail[4];
      float scale, found[GROUP] = {};
      load_words<4>(unit + 128, tail);
      scale = Form<T>::CROSSED ? *reinterpret_cast<const float*>(unit + 144) : __int_as_float((int)tail[0]);
#pragma unroll
      for (int s = 0; s < SPANS; s++) {
        int upper[GROUP] = {}, lower[GROUP] = {};
#pragma unroll
        for (int g = s * EACH; g < (s + 1) * EACH; g++) {
          u32 high[4], low[4];
          load_words<4>(unit + g * 32, high), load_words<4>(unit + g * 32 + 16, low);
#pragma unroll
          for (int w = 0; w < GROUP; w++)
#pragma unroll
            for (int i = 0; i < 4; i++) {
              upper[w] = dot_bytes<Form<T>::SIGNED>(numbers[w][4 * g + i], high[i], upper[w]);
              lower[w] = dot_bytes<Form<T>::SIGNED>(numbers[w][4 * g + i], low[i], lower[w]);
            }
        }
        float sum = __int_as_float((int)tail[!Form<T>::OFFSETS ? 0 : Form<T>::CROSSED ? s : 1 + s]);
#pragma unroll
        for (int w = 0; w < GROUP; w++) {
          // At most 32 * 128 * 32639: far from 2**31.
          found[w] += factors[w][s] * (float)(upper[w] * 256 + lower[w]);
          if (Form<T>::OFFSETS) found[w] += offsets[w][s] * sum;
        }
      }
#pragma unroll
      for (int w = 0; w < GROUP; w++) sums[w][r] += scale * found[w];
    }
  }
}

// A block's share of the groups of rows, and a warp's share of their steps.
struct Share {
  i64 first;
  int groups;
  int steps;
  int warp_bits;
  __device__ __forceinline__ int begin(int warp) const {
    return (int)((i64)groups * steps * warp >> warp_bits);
  }
};

// Lane `w * ROWS + r` has the sum of row w of a group and row r of the activations.
template <int ROWS>
static __device__ __forceinline__ void write(
    const ProductParameters& p, u8* result, i64 group, int lane, float sum, bool adds) {
  i64 row = group * GROUP + lane / ROWS;
  if (lane >= GROUP * ROWS || row >= p.n || lane % ROWS >= p.rows) return;
  float* place = reinterpret_cast<float*>(result + lane % ROWS * p.result_stride) + row;
  *place = adds ? *place + sum : sum;
}

// A warp's steps. `pieces`: for each warp the sums of a group that another warp began, and of one
// that another warp ends.
template <int T, int ROWS>
static __device__ __forceinline__ void sum_steps(
    const ProductParameters& p, const Matrices& at, const Share& share, i64 start, u8* xs, u8* ring,
    float* pieces) {
  constexpr int SLOT = GROUP * Step<T>::ROOM;
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32, steps = share.steps;
  const int from = share.begin(warp), to = share.begin(warp + 1);
  const i64 row_bytes = (p.k / 32 / Stored<T>::PARTS) * Stored<T>::BYTES;
  const i64 start_bytes = start / 32 / Stored<T>::PARTS * Stored<T>::BYTES;
  const i64 plane = p.chunk / Step<T>::ELEMENTS * Step<T>::X_BYTES;
  const bool aligned = ((u64)at.weights | (u64)p.weight_stride) % 16 == 0;
  Place coming = {from / steps, from % steps}, here = coming;
  const SharedPlace ring_place = shared_place(ring);
  int fetched = from, next_slot = 0, slot = 0;
  auto fetch_next = [&]() {
    if (fetched < to) {
      i64 row = (share.first + coming.group) * GROUP, bytes = start_bytes + (i64)coming.step * Step<T>::BYTES;
      const u8* place = at.weights + row * p.weight_stride + bytes;
      fetch<T>(place, p.weight_stride, p.n - row, row_bytes - bytes, ring_place + next_slot, lane, aligned);
      coming.advance(steps);
      fetched++;
      next_slot = next_slot == (RING - 1) * SLOT ? 0 : next_slot + SLOT;
    }
    end_copies();
  };
#pragma unroll 1
  for (int i = 0; i < RING - 1; i++) fetch_next();
  prepare<T, ROWS>(p, at.x, start, steps, xs);
  __syncthreads();
  float sums[GROUP][ROWS] = {};
  for (int item = from; item < to; item++) {
    fetch_next();
    await_copies<RING - 1>();
    __syncwarp();
    if (!aligned) {
      i64 row = (share.first + here.group) * GROUP;
#pragma unroll 1
      for (int w = 0; w < GROUP; w++) {
        int skew = (int)(((u64)at.weights + (row + w) * p.weight_stride) % 16);
        if (skew) move_down(ring + slot + w * Step<T>::ROOM, skew, Step<T>::BYTES, lane);
      }
    }
    add_step<T, ROWS>(ring + slot, xs + (i64)here.step * Step<T>::X_BYTES, plane, lane, sums);
    slot = slot == (RING - 1) * SLOT ? 0 : slot + SLOT;
    // Before other lanes copy the next step to this place.
    __syncwarp();
    bool ends = here.step == steps - 1;
    if (ends || item == to - 1) {
      float mine = 0.0f;
#pragma unroll
      for (int w = 0; w < GROUP; w++)
#pragma unroll
        for (int r = 0; r < ROWS; r++) {
          float sum = warp_sum(sums[w][r]);
          if (lane == w * ROWS + r) mine = sum;
          sums[w][r] = 0.0f;
        }
      bool begins = here.group * steps >= from;
      if (begins && ends)
        write<ROWS>(p, at.result, share.first + here.group, lane, mine, start > 0);
      else if (lane < GROUP * ROWS)
        pieces[(warp * 2 + begins) * GROUP * ROWS + lane] = mine;
    }
    here.advance(steps);
  }
  await_copies<0>();
}

// Adds the pieces of the group that a warp began and others continued, in their order.
template <int ROWS>
static __device__ __forceinline__ void join_pieces(
    const ProductParameters& p, const Matrices& at, const Share& share, const float* pieces, bool adds) {
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32, warps = 1 << share.warp_bits;
  const int from = share.begin(warp), to = share.begin(warp + 1);
  if (from == to) return;
  const int group = (to - 1) / share.steps, end = (group + 1) * share.steps;
  if (group * share.steps < from || end <= to || lane >= GROUP * ROWS) return;
  float sum = pieces[(warp * 2 + 1) * GROUP * ROWS + lane];
  for (int other = warp + 1; other < warps && share.begin(other) < end; other++)
    if (share.begin(other) < share.begin(other + 1)) sum += pieces[other * 2 * GROUP * ROWS + lane];
  write<ROWS>(p, at.result, share.first + group, lane, sum, adds);
}

// Shared memory: the activations of a chunk, the warps' rings, their pieces.
template <int T, int ROWS>
static __device__ __forceinline__ void few_rows(const ProductParameters& p) {
  DYNAMIC_SHARED(u8, xs);
  const int warp = threadIdx.x / 32, warps = 1 << p.warp_bits;
  const i64 x_bytes = ROWS * (p.chunk / Step<T>::ELEMENTS * Step<T>::X_BYTES);
  u8* ring = xs + x_bytes + warp * (RING * GROUP * Step<T>::ROOM);
  float* pieces = reinterpret_cast<float*>(xs + x_bytes + warps * (RING * GROUP * Step<T>::ROOM));
  Matrices at = find(p, blockIdx.y);
  if (!is_there(p, at.expert, threadIdx.x == 0 && blockIdx.x == 0)) return;
  at.weights += at.expert * p.expert_stride;
  Share share;
  share.first = p.groups * blockIdx.x + (blockIdx.x < p.larger_blocks ? blockIdx.x : p.larger_blocks);
  share.groups = (int)p.groups + (blockIdx.x < p.larger_blocks);
  share.warp_bits = p.warp_bits;
  for (i64 start = 0; start < p.k; start += p.chunk) {
    i64 depth = p.k - start < p.chunk ? p.k - start : p.chunk;
    share.steps = (int)((depth + Step<T>::ELEMENTS - 1) / Step<T>::ELEMENTS);
    sum_steps<T, ROWS>(p, at, share, start, xs, ring, pieces);
    // All pieces are written, and no warp reads activations any more.
    __syncthreads();
    join_pieces<ROWS>(p, at, share, pieces, start > 0);
  }
}

#define WARPS(T, rows) (rows == 8 || Step<T>::BYTES > 1600 ? 8 : 16)
#define PRODUCTS(T, name)                                                                 \
  KERNEL(product_one_##name, ProductParameters, WARPS(T, 1) * 32) { few_rows<T, 1>(p); }  \
  KERNEL(product_four_##name, ProductParameters, WARPS(T, 4) * 32) { few_rows<T, 4>(p); } \
  KERNEL(product_eight_##name, ProductParameters, WARPS(T, 8) * 32) { few_rows<T, 8>(p); }
PRODUCTS(F16, f16)
PRODUCTS(BF16, bf16)
PRODUCTS(Q4_0, q4_0)
PRODUCTS(Q4_1, q4_1)
PRODUCTS(Q5_0, q5_0)
PRODUCTS(Q5_1, q5_1)
PRODUCTS(Q8_0, q8_0)
PRODUCTS(Q2_K, q2_k)
PRODUCTS(Q3_K, q3_k)
PRODUCTS(Q4_K, q4_k)
PRODUCTS(Q5_K, q5_k)
PRODUCTS(Q6_K, q6_k)
PRODUCTS(IQ4_NL, iq4_nl)
PRODUCTS(IQ4_XS, iq4_xs)
PRODUCTS(MXFP4, mxfp4)
PRODUCTS(TQ1_0, tq1_0)
PRODUCTS(TQ2_0, tq2_0)
PRODUCTS(IQ1_S, iq1_s)
PRODUCTS(IQ1_M, iq1_m)
PRODUCTS(IQ2_XXS, iq2_xxs)
PRODUCTS(IQ2_XS, iq2_xs)
PRODUCTS(IQ2_S, iq2_s)
PRODUCTS(IQ3_XXS, iq3_xxs)
PRODUCTS(IQ3_S, iq3_s)
PRODUCTS(NVFP4, nvfp4)
