// Shared by the kernels of attention: parameters, the places of a line's operands, masks.
//
// A line is a row of q of one head: its query. Exponents are to base two: e^x = 2^(x log2 e).

struct AttentionParameters {
  u64 q, k, v, mask, sinks, result;
  u64 partial;  // f32 [splits, lines, dv + 2]: of each split of the keys sums, largest exponent, total
  u64 q_bias, k_bias, v_bias;  // rows added first if `has_biases` has their bit, by head; strides in bytes
  i64 q_bias_stride, k_bias_stride, v_bias_stride;
  u64 pages, failure;  // pages: tables of i32 by batch; 0: keys and values are contiguous
  // In bytes: from a table to the next and from a number to the next, and from a page to the next.
  i64 table_stride, number_stride, k_page_stride, v_page_stride;
  Divisor page[1];  // by the keys of a page
  // In bytes, of batch, head and row; the elements of a row are contiguous.
  i64 q_strides[3], k_strides[3], v_strides[3], mask_strides[3], result_strides[3];
  int heads;
  int rows;
  int keys;
  int d;
  int dv;
  int batch_repeat, head_repeat;  // the number of q's that share one of k's and v's
  int mask_batches, mask_heads;   // masks repeat after this many
  int q_type, k_type, v_type, mask_type, sinks_type, result_type;
  int has_mask, has_sinks;
  int has_biases;  // bits: 1 q, 2 k, 4 v; if set, all have the type of the computation
  int splits;  // of the keys, over blocks
  int tiles_of_split;
  int page_count;   // numbers in tables must be smaller
  int table_pages;  // numbers of a table
  int node;
  float scale;
  float cap;
  float max_bias;
  float slope_power;
};

// The ALiBi slope of a head.
static __device__ __forceinline__ float slope_of(const AttentionParameters& p, int head) {
  if (p.max_bias == 0.0f) return 1.0f;
  float at = (float)head;
  float exponent = at < p.slope_power ? at + 1.0f : (2.0f * (at - p.slope_power) + 1.0f) / 2.0f;
  return exp2f(exponent * (-p.max_bias / p.slope_power));
}

static __device__ __forceinline__ float sink_of(const AttentionParameters& p, int head) {
  if (!p.has_sinks) return -INFINITE;
  return load(reinterpret_cast<const u8*>(p.sinks) + (i64)head * size_of(p.sinks_type), p.sinks_type);
}

static __device__ __forceinline__ const u8* query_at(const AttentionParameters& p, u32 batch, u32 head, int row) {
  return reinterpret_cast<const u8*>(p.q) + batch * p.q_strides[0] + head * p.q_strides[1] + row * p.q_strides[2];
}

static __device__ __forceinline__ const u8* mask_at(const AttentionParameters& p, u32 batch, u32 head, int row) {
  return reinterpret_cast<const u8*>(p.mask) + batch % (u32)p.mask_batches * p.mask_strides[0] +
         head % (u32)p.mask_heads * p.mask_strides[1] + row * p.mask_strides[2];
}

static __device__ __forceinline__ u8* result_at(const AttentionParameters& p, u32 batch, u32 head, int row) {
  return reinterpret_cast<u8*>(p.result) + batch * p.result_strides[0] + head * p.result_strides[1] +
         row * p.result_strides[2];
}

// Keys and values of a batch and of one of their own heads.
static __device__ __forceinline__ const u8* keys_at(const AttentionParameters& p, u32 batch, u32 head) {
  return reinterpret_cast<const u8*>(p.k) + batch / (u32)p.batch_repeat * p.k_strides[0] + head * p.k_strides[1];
}

static __device__ __forceinline__ const u8* values_at(const AttentionParameters& p, u32 batch, u32 head) {
  return reinterpret_cast<const u8*>(p.v) + batch / (u32)p.batch_repeat * p.v_strides[0] + head * p.v_strides[1];
}

// The number of a page of a batch; for one that is out of range, 0.
static __device__ __forceinline__ int page_of(const AttentionParameters& p, u32 batch, u32 place) {
  const u8* table = reinterpret_cast<const u8*>(p.pages) + batch * p.table_stride;
  int page = *reinterpret_cast<const int*>(table + place * p.number_stride);
  return page >= 0 && page < p.page_count ? page : 0;
}

// A key's row of the keys or values of a batch, in its page.
static __device__ __forceinline__ const u8* row_in_page(
    const AttentionParameters& p, u32 batch, const u8* rows, i64 page_stride, i64 stride, u32 key) {
  u32 place = divided(key, p.page[0]);
  return rows + page_of(p, batch, place) * page_stride + (key - place * p.page[0].size) * stride;
}

// The first block of a batch reports a number in its table that is of no page.
template <int THREADS>
static __device__ __forceinline__ void check_pages(const AttentionParameters& p) {
  if (!p.pages || blockIdx.x != 0 || blockIdx.y != 0) return;
  const u8* table = reinterpret_cast<const u8*>(p.pages) + blockIdx.z * p.table_stride;
  for (int place = threadIdx.x; place < p.table_pages; place += THREADS) {
    int page = *reinterpret_cast<const int*>(table + place * p.number_stride);
    if (page < 0 || page >= p.page_count) report(p.failure, p.node, page);
  }
}

// The place of a line's sums in `partial`.
static __device__ __forceinline__ float* partial_at(const AttentionParameters& p, int split, i64 lines, i64 line) {
  return reinterpret_cast<float*>(p.partial) + (split * lines + line) * (p.dv + 2);
}

// 2^(x - top), where a top of minus infinity means that no key was seen yet.
static __device__ __forceinline__ float power(float x, float top) {
  return fast_exp2(x - (top == -INFINITE ? 0.0f : top));
}
