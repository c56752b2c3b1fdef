// The gradient of gathered rows: each row of the result adds the gradients of its index, in their
// order.

struct GatherBackParameters {
  Walk walk;  // of matrices
  i64 count;  // rows of all results
  i64 columns;
  i64 there;  // rows of a result
  i64 given;  // indices of a matrix
  Operand result;
  Operand gradient;
  Operand indices;
  i64 result_steps[2];  // bytes between rows, and between their elements
  i64 gradient_steps[2];
  i64 index_step;
  u64 failure;
  int node;
  int wide_indices;
};

KERNEL(get_rows_back, GatherBackParameters, 256) {
  for (i64 number = blockIdx.x; number < p.count; number += gridDim.x) {
    i64 matrix = number / p.there, row = number - matrix * p.there;
    const u8* indices = row_of(p.walk, p.indices, matrix);
    auto index_at = [&](i64 at) {
      const u8* place = indices + at * p.index_step;
      return p.wide_indices ? *reinterpret_cast<const i64*>(place) : (i64)*reinterpret_cast<const int*>(place);
    };
    // The first row's block looks at all indices.
    for (i64 at = threadIdx.x; row == 0 && at < p.given; at += blockDim.x)
      if (index_at(at) < 0 || index_at(at) >= p.there) report(p.failure, p.node, index_at(at));
    const u8* gradient = row_of(p.walk, p.gradient, matrix);
    u8* to = row_of(p.walk, p.result, matrix) + row * p.result_steps[0];
    for (i64 c = threadIdx.x; c < p.columns; c += blockDim.x) {
      float sum = 0.0f;
      for (i64 at = 0; at < p.given; at++)
        if (index_at(at) == row)
          sum += load(gradient + at * p.gradient_steps[0] + c * p.gradient_steps[1], p.gradient.type);
      *reinterpret_cast<float*>(to + c * p.result_steps[1]) = sum;
    }
  }
}
