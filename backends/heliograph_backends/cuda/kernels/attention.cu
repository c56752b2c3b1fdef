// Attention in one kernel: scores, their softmax and the sum of values, without the scores in memory.
//
// The largest score and the sum of powers of a row are kept up to date as keys come (Milakov and Gimelshein, "Online
// normalizer calculation for softmax", 2018; Dao et al., "FlashAttention", 2022). Few rows: a block has one row, and
// its warps share the keys. Many rows: a block has 64 rows of a head, 32 keys at a time, on the matrix units in tf32.

struct AttentionParameters {
  i64 heads;
  i64 rows;
  i64 keys;
  i64 d;
  i64 dv;
  u64 q, k, v, mask, sinks, result;
  // In bytes, of batch, head and row; elements of a row lie side by side.
  i64 q_strides[3], k_strides[3], v_strides[3], mask_strides[3], result_strides[3];
  i64 batch_repeat, head_repeat;    // how many of q's share one of k's and v's
  i64 mask_batches, mask_heads;     // masks come again after so many
  int q_type, k_type, v_type, mask_type, sinks_type, result_type;
  int has_mask, has_sinks;
  float scale;
  float cap;
  float max_bias;
  float slope_power;
};

struct Head {
  const u8 *q, *k, *v, *mask;
  u8* result;
  float slope;
  float sink;

  __device__ Head(const AttentionParameters& p, i64 batch, i64 head) {
    i64 kb = batch / p.batch_repeat, kh = head / p.head_repeat;
    q = reinterpret_cast<const u8*>(p.q) + batch * p.q_strides[0] + head * p.q_strides[1];
    k = reinterpret_cast<const u8*>(p.k) + kb * p.k_strides[0] + kh * p.k_strides[1];
    v = reinterpret_cast<const u8*>(p.v) + kb * p.v_strides[0] + kh * p.v_strides[1];
    mask = reinterpret_cast<const u8*>(p.mask) + batch % p.mask_batches * p.mask_strides[0] +
           head % p.mask_heads * p.mask_strides[1];
    result = reinterpret_cast<u8*>(p.result) + batch * p.result_strides[0] + head * p.result_strides[1];
    sink = p.has_sinks
               ? load(reinterpret_cast<const u8*>(p.sinks) + head * size_of(p.sinks_type), p.sinks_type)
               : -INFINITE;
    slope = 1.0f;
    if (p.max_bias != 0.0f) {
      float at = (float)head;
      float exponent = at < p.slope_power ? at + 1.0f : (2.0f * (at - p.slope_power) + 1.0f) / 2.0f;
      slope = exp2f(exponent * (-p.max_bias / p.slope_power));
    }
  }

  // A score from a product of a row of q and a key.
  __device__ float score(const AttentionParameters& p, float product, i64 row, i64 key) const {
    float found = p.cap != 0.0f ? p.cap * tanhf(product * (p.scale / p.cap)) : product * p.scale;
    if (p.has_mask) found += slope * load(mask + row * p.mask_strides[2] + key * size_of(p.mask_type), p.mask_type);
    return found;
  }
};

// exp(score - top), where a top of minus infinity means that nothing was seen yet.
static __device__ __forceinline__ float power(float score, float top) {
  return expf(score - (top == -INFINITE ? 0.0f : top));
}

#define FEW_WARPS 4
#define MOST_D 256

KERNEL(attention_few, AttentionParameters, FEW_WARPS * 32) {
  __shared__ float tops[FEW_WARPS], totals[FEW_WARPS], sums[FEW_WARPS][MOST_D];
  int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  i64 row = blockIdx.x, head = blockIdx.y, batch = blockIdx.z;
  Head at(p, batch, head);
  float q[MOST_D / 32], sum[MOST_D / 32], top = -INFINITE, total = 0.0f;
#pragma unroll
  for (int i = 0; i < MOST_D / 32; i++) {
    int column = lane + 32 * i;
    q[i] = column < p.d ? load(at.q + row * p.q_strides[2] + column * size_of(p.q_type), p.q_type) : 0.0f;
    sum[i] = 0.0f;
  }
  for (i64 key = warp; key < p.keys; key += FEW_WARPS) {
    const u8* k = at.k + key * p.k_strides[2];
    const u8* v = at.v + key * p.v_strides[2];
    float product = 0.0f;
#pragma unroll
    for (int i = 0; i < MOST_D / 32; i++)
      if (lane + 32 * i < p.d) product += q[i] * load(k + (lane + 32 * i) * size_of(p.k_type), p.k_type);
    float score = at.score(p, warp_sum(product), row, key);
    float higher = larger(top, score), shrink = power(top, higher), weight = power(score, higher);
    total = total * shrink + weight;
#pragma unroll
    for (int i = 0; i < MOST_D / 32; i++)
      if (lane + 32 * i < p.dv)
        sum[i] = sum[i] * shrink + weight * load(v + (lane + 32 * i) * size_of(p.v_type), p.v_type);
    top = higher;
  }
  if (lane == 0) tops[warp] = top, totals[warp] = total;
#pragma unroll
  for (int i = 0; i < MOST_D / 32; i++)
    if (lane + 32 * i < p.dv) sums[warp][lane + 32 * i] = sum[i];
  __syncthreads();
  float highest = at.sink, all = 0.0f;
  for (int w = 0; w < FEW_WARPS; w++) highest = larger(highest, tops[w]);
  for (int w = 0; w < FEW_WARPS; w++) all += totals[w] * power(tops[w], highest);
  if (p.has_sinks) all += power(at.sink, highest);
  for (int column = threadIdx.x; column < p.dv; column += FEW_WARPS * 32) {
    float found = 0.0f;
    for (int w = 0; w < FEW_WARPS; w++) found += sums[w][column] * power(tops[w], highest);
    store(at.result + row * p.result_strides[2] + column * size_of(p.result_type), p.result_type,
          found / (all == 0.0f ? 1.0f : all));
  }
}

#define BLOCK_ROWS 64
#define BLOCK_KEYS 32
#define MANY_THREADS 128

static __device__ __forceinline__ void stage_rows(
    const u8* from, i64 stride, int type, i64 first, i64 count, int rows, int columns, int pitch, u32* to) {
  for (int i = threadIdx.x; i < rows * columns; i += MANY_THREADS) {
    int row = i / columns, column = i % columns;
    float value = first + row < count ? load(from + (first + row) * stride + column * size_of(type), type) : 0.0f;
    to[row * pitch + column] = to_tf32(value);
  }
}

// A warp's sixteen rows against the keys that are staged: scores in the layout of multiply_tiles' d.
template <int D>
static __device__ __forceinline__ void products_of(const u32* q, const u32* k, int g, int t, float (&s)[4][4]) {
  for (int n = 0; n < 4; n++)
    for (int i = 0; i < 4; i++) s[n][i] = 0.0f;
#pragma unroll 2
  for (int column = 0; column < D; column += 8) {
    const u32* place = q + g * (D + 4) + column + t;
    u32 a[4] = {place[0], place[8 * (D + 4)], place[4], place[8 * (D + 4) + 4]};
#pragma unroll
    for (int n = 0; n < 4; n++) {
      const u32* key = k + (n * 8 + g) * (D + 4) + column + t;
      u32 b[2] = {key[0], key[4]};
      multiply_tiles(s[n], a, b);
    }
  }
}

template <int D>
static __device__ __forceinline__ void attend(const AttentionParameters& p) {
  DYNAMIC_SHARED(u32, shared);
  u32* qs = shared;
  u32* ks = qs + BLOCK_ROWS * (D + 4);
  u32* vs = ks + BLOCK_KEYS * (D + 4);
  u32* ps = vs + BLOCK_KEYS * (D + 8);
  int lane = threadIdx.x % 32, warp = threadIdx.x / 32, g = lane / 4, t = lane % 4;
  i64 first = (i64)blockIdx.x * BLOCK_ROWS;
  Head at(p, blockIdx.z, blockIdx.y);
  stage_rows(at.q, p.q_strides[2], p.q_type, first, p.rows, BLOCK_ROWS, D, D + 4, qs);
  u32* own_p = ps + warp * 16 * (BLOCK_KEYS + 4);
  float sums[D / 8][4], top[2] = {-INFINITE, -INFINITE}, total[2] = {0.0f, 0.0f};
#pragma unroll
  for (int n = 0; n < D / 8; n++)
    for (int i = 0; i < 4; i++) sums[n][i] = 0.0f;
  for (i64 start = 0; start < p.keys; start += BLOCK_KEYS) {
    __syncthreads();
    stage_rows(at.k, p.k_strides[2], p.k_type, start, p.keys, BLOCK_KEYS, D, D + 4, ks);
    stage_rows(at.v, p.v_strides[2], p.v_type, start, p.keys, BLOCK_KEYS, D, D + 8, vs);
    __syncthreads();
    float s[4][4];
    products_of<D>(qs + warp * 16 * (D + 4), ks, g, t, s);
    float higher[2] = {top[0], top[1]};
#pragma unroll
    for (int n = 0; n < 4; n++)
#pragma unroll
      for (int i = 0; i < 4; i++) {
        i64 row = first + warp * 16 + g + i / 2 * 8, key = start + n * 8 + 2 * t + i % 2;
        s[n][i] = row < p.rows && key < p.keys ? at.score(p, s[n][i], row, key) : -INFINITE;
        higher[i / 2] = larger(higher[i / 2], s[n][i]);
      }
    float shrink[2], added[2] = {0.0f, 0.0f};
    for (int half = 0; half < 2; half++) {
      higher[half] = larger(higher[half], __shfl_xor_sync(FULL_WARP, higher[half], 1));
      higher[half] = larger(higher[half], __shfl_xor_sync(FULL_WARP, higher[half], 2));
      shrink[half] = power(top[half], higher[half]);
      top[half] = higher[half];
    }
#pragma unroll
    for (int n = 0; n < 4; n++)
#pragma unroll
      for (int i = 0; i < 4; i++) {
        float weight = power(s[n][i], top[i / 2]);
        added[i / 2] += weight;
        own_p[(g + i / 2 * 8) * (BLOCK_KEYS + 4) + n * 8 + 2 * t + i % 2] = to_tf32(weight);
      }
    for (int half = 0; half < 2; half++) {
      added[half] += __shfl_xor_sync(FULL_WARP, added[half], 1);
      added[half] += __shfl_xor_sync(FULL_WARP, added[half], 2);
      total[half] = total[half] * shrink[half] + added[half];
    }
    __syncwarp();
#pragma unroll
    for (int n = 0; n < D / 8; n++)
      for (int i = 0; i < 4; i++) sums[n][i] *= shrink[i / 2];
#pragma unroll 1
    for (int key = 0; key < BLOCK_KEYS; key += 8) {
      const u32* place = own_p + g * (BLOCK_KEYS + 4) + key + t;
      u32 a[4] = {place[0], place[8 * (BLOCK_KEYS + 4)], place[4], place[8 * (BLOCK_KEYS + 4) + 4]};
#pragma unroll
      for (int n = 0; n < D / 8; n++) {
        const u32* value = vs + (key + t) * (D + 8) + n * 8 + g;
        u32 b[2] = {value[0], value[4 * (D + 8)]};
        multiply_tiles(sums[n], a, b);
      }
    }
    __syncwarp();
  }
  for (int half = 0; half < 2; half++) {
    float highest = larger(top[half], at.sink);
    float shrink = power(top[half], highest);
    total[half] = total[half] * shrink + (p.has_sinks ? power(at.sink, highest) : 0.0f);
    top[half] = shrink / (total[half] == 0.0f ? 1.0f : total[half]);
  }
#pragma unroll
  for (int n = 0; n < D / 8; n++)
#pragma unroll
    for (int i = 0; i < 4; i++) {
      i64 row = first + warp * 16 + g + i / 2 * 8;
      int column = n * 8 + 2 * t + i % 2;
      if (row < p.rows)
        store(at.result + row * p.result_strides[2] + column * size_of(p.result_type), p.result_type,
              sums[n][i] * top[i / 2]);
    }
}

#define ATTENTION(D) \
  KERNEL(attention_##D, AttentionParameters, MANY_THREADS) { attend<D>(p); }
ATTENTION(32)
ATTENTION(64)
ATTENTION(80)
ATTENTION(96)
ATTENTION(128)
ATTENTION(256)
