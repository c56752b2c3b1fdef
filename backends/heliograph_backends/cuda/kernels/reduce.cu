// Reductions over any dimensions: the reduced ones have their own walk.
struct ReduceParameters {
  Walk walk;
  Walk inner;
  i64 rows;
  i64 columns;
  Operand x;        // strides over the results
  Operand along;    // strides over the reduced dimensions
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
  bool plain = p.inner.dimensions <= 1;
  bool sums = p.operation < 2;
  float sign = p.operation == 3 ? -1.0f : 1.0f, found = sums ? 0.0f : -INFINITE;
  for (i64 c = thread; c < p.columns; c += p.threads) {
    float value = sign * load(x + (plain ? c * p.along.strides[0] : offset_at(p.inner, p.along, c)), p.x.type);
    found = sums ? found + value : larger(found, value);
  }
  found = sums ? row_sum(found, shared, p.threads) : row_larger(found, shared, p.threads);
  if (p.operation == 1) found /= (float)p.columns;
  if (thread == 0) store(row_of(p.walk, p.result, number), p.result.type, sign * found);
}
