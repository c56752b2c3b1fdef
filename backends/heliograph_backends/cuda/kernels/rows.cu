// Ops along rows: soft_max, norm, rms_norm and l2_norm. A warp or a block has one row.

struct RowsParameters {
  Walk walk;  // of the rows
  i64 rows;
  i64 columns;
  Operand x;
  Operand result;
  Operand second;  // the mask, or what a norm is multiplied with
  Operand third;   // the sinks, or what is added to a norm
  i64 inner[4];    // bytes between the elements of a row of x, result, second, third
  i64 heads;       // of soft_max: matrices of `matrix_rows` rows that have slopes and sinks of their own
  i64 matrix_rows;
  int has_second;
  int has_third;
  float scale;  // of norms: eps
  float max_bias;
  float slope_power;  // the largest power of 2 that is not above heads
  int threads;        // of a row: 32, or the block's
};

struct Row {
  const RowsParameters& p;
  i64 number;
  u8 *x, *result, *second, *third;

  __device__ Row(const RowsParameters& p, i64 number)
      : p(p), number(number), x(row_of(p.walk, p.x, number)), result(row_of(p.walk, p.result, number)),
        second(p.has_second ? row_of(p.walk, p.second, number) : nullptr),
        third(p.has_third ? row_of(p.walk, p.third, number) : nullptr) {}

  __device__ float get(i64 column) const { return load(x + column * p.inner[0], p.x.type); }
  __device__ float mask(i64 column) const { return load(second + column * p.inner[2], p.second.type); }
  __device__ void put(i64 column, float value) const { store(result + column * p.inner[1], p.result.type, value); }
};

// A row for each warp, or one for the block; whether this thread has one. Threads count within their row.
#define EACH_ROW                                                            \
  __shared__ float shared[32];                                              \
  bool by_warp = p.threads == 32;                                           \
  i64 per_block = by_warp ? blockDim.x / 32 : 1;                            \
  i64 number = blockIdx.x * per_block + (by_warp ? threadIdx.x / 32 : 0);   \
  int thread = by_warp ? threadIdx.x % 32 : threadIdx.x;                    \
  if (number >= p.rows) return;                                             \
  Row row(p, number)

static __device__ __forceinline__ float slope_of(const RowsParameters& p, i64 head) {
  if (p.max_bias == 0.0f) return 1.0f;
  float at = (float)head, exponent = at < p.slope_power ? at + 1.0f : (2.0f * (at - p.slope_power) + 1.0f) / 2.0f;
  return exp2f(exponent * (-p.max_bias / p.slope_power));
}

KERNEL(soft_max, RowsParameters, 1024) {
  EACH_ROW;
  i64 head = number / p.matrix_rows % p.heads;
  float slope = slope_of(p, head);
  float top = -INFINITE;
  for (i64 c = thread; c < p.columns; c += p.threads) {
    float score = __fmul_rn(row.get(c), p.scale);
    if (p.has_second) score = __fadd_rn(score, __fmul_rn(slope, row.mask(c)));
    top = larger(top, score);
  }
  top = row_larger(top, shared, p.threads);
  float sink = p.has_third ? load(reinterpret_cast<u8*>(p.third.address) + head * p.inner[3], p.third.type) : 0.0f;
  if (p.has_third) top = larger(top, sink);
  float total = 0.0f;
  for (i64 c = thread; c < p.columns; c += p.threads) {
    float score = __fmul_rn(row.get(c), p.scale);
    if (p.has_second) score = __fadd_rn(score, __fmul_rn(slope, row.mask(c)));
    total += expf(score - top);
  }
  total = row_sum(total, shared, p.threads);
  if (p.has_third) total += expf(sink - top);
  for (i64 c = thread; c < p.columns; c += p.threads) {
    float score = __fmul_rn(row.get(c), p.scale);
    if (p.has_second) score = __fadd_rn(score, __fmul_rn(slope, row.mask(c)));
    row.put(c, expf(score - top) / total);
  }
}

// What a norm gives, rounded as the nodes one by one would be: times a row, plus a row.
static __device__ __forceinline__ void put_normal(const Row& row, i64 column, float value) {
  const RowsParameters& p = row.p;
  value = rounded(value, p.result.type);
  if (p.has_second) value = rounded(__fmul_rn(value, row.mask(column)), p.result.type);
  if (p.has_third)
    value = rounded(__fadd_rn(value, load(row.third + column * p.inner[3], p.third.type)), p.result.type);
  row.put(column, value);
}

KERNEL(layer_norm, RowsParameters, 1024) {
  EACH_ROW;
  float sum = 0.0f, squares = 0.0f;
  for (i64 c = thread; c < p.columns; c += p.threads) sum += row.get(c);
  float mean = row_sum(sum, shared, p.threads) / (float)p.columns;
  for (i64 c = thread; c < p.columns; c += p.threads) {
    float centered = row.get(c) - mean;
    squares += centered * centered;
  }
  float deviation = sqrtf(row_sum(squares, shared, p.threads) / (float)p.columns + p.scale);
  for (i64 c = thread; c < p.columns; c += p.threads) put_normal(row, c, (row.get(c) - mean) / deviation);
}

KERNEL(rms_norm, RowsParameters, 1024) {
  EACH_ROW;
  float squares = 0.0f;
  for (i64 c = thread; c < p.columns; c += p.threads) squares += row.get(c) * row.get(c);
  float length = sqrtf(row_sum(squares, shared, p.threads) / (float)p.columns + p.scale);
  for (i64 c = thread; c < p.columns; c += p.threads) put_normal(row, c, row.get(c) / length);
}

KERNEL(l2_norm, RowsParameters, 1024) {
  EACH_ROW;
  float squares = 0.0f;
  for (i64 c = thread; c < p.columns; c += p.threads) squares += row.get(c) * row.get(c);
  float length = larger(sqrtf(row_sum(squares, shared, p.threads)), p.scale);
  for (i64 c = thread; c < p.columns; c += p.threads) row.put(c, row.get(c) / length);
}

// Reductions over any dimensions: what is reduced has a walk of its own.
struct ReduceParameters {
  Walk walk;
  Walk inner;
  i64 rows;
  i64 columns;
  Operand x;        // strides over the results
  Operand along;    // strides over what is reduced
  Operand result;
  int operation;    // 0 sum, 1 mean, 2 max, 3 min
  int threads;
};

KERNEL(reduce, ReduceParameters, 1024) {
  __shared__ float shared[32];
  bool by_warp = p.threads == 32;
  i64 per_block = by_warp ? blockDim.x / 32 : 1;
  i64 number = blockIdx.x * per_block + (by_warp ? threadIdx.x / 32 : 0);
  int thread = by_warp ? threadIdx.x % 32 : threadIdx.x;
  if (number >= p.rows) return;
  const u8* x = row_of(p.walk, p.x, number);
  bool sums = p.operation < 2;
  float sign = p.operation == 3 ? -1.0f : 1.0f, found = sums ? 0.0f : -INFINITE;
  for (i64 c = thread; c < p.columns; c += p.threads) {
    float value = sign * load(x + offset_at(p.inner, p.along, c), p.x.type);
    found = sums ? found + value : larger(found, value);
  }
  found = sums ? row_sum(found, shared, p.threads) : row_larger(found, shared, p.threads);
  if (p.operation == 1) found /= (float)p.columns;
  if (thread == 0) store(row_of(p.walk, p.result, number), p.result.type, sign * found);
}
