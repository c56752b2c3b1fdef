// soft_max and the norms, over rows that `rows.cuh` reads.

static __device__ __forceinline__ float exp_of(float x) { return fast_exp2(x * LOG2_E); }

static __device__ __forceinline__ float slope_of(const RowsParameters& p, u32 head) {
  if (p.max_bias == 0.0f) return 1.0f;
  float at = (float)head, exponent = at < p.slope_power ? at + 1.0f : (2.0f * (at - p.slope_power) + 1.0f) / 2.0f;
  return exp2f(exponent * (-p.max_bias / p.slope_power));
}

struct SoftMax {
  const Row& row;
  const u8 *x, *mask;
  u8* result;
  float slope, sink;

  __device__ __forceinline__ SoftMax(const Row& row) : row(row), slope(1.0f), sink(-INFINITE) {
    const RowsParameters& p = row.p;
    x = row.at(p.x, 0), result = row.at(p.result, 1), mask = p.has_second ? row.at(p.second, 2) : x;
    if (!p.has_third && p.max_bias == 0.0f) return;
    u32 head = row.number / (u32)p.matrix_rows % (u32)p.heads;
    slope = slope_of(p, head);
    if (p.has_third) sink = load(in_memory(p.third.address) + head * p.inner[3], p.third_type);
  }

  __device__ __forceinline__ bool is_wide() const {
    const RowsParameters& p = row.p;
    bool all = p.packed && row.is_wide(x, p.type) && row.is_wide(result, p.type);
    return all && (!p.has_second || row.is_wide(mask, p.second_type));
  }

  __device__ __forceinline__ float score(float value, float shown) const {
    float scaled = __fmul_rn(value, row.p.scale);
    return row.p.has_second ? __fadd_rn(scaled, __fmul_rn(slope, shown)) : scaled;
  }

  template <int COUNT, bool NARROW>
  __device__ __forceinline__ void run(Held<COUNT, NARROW> held, float* shared) {
    typename Four<NARROW>::Words words[COUNT];
    held.fetch(x, words);
    if (!row.p.has_second) {
      open(held, words);
    } else if (row.p.second_type == F32) {
      open_masked<false>(held, words);
    } else {
      open_masked<true>(held, words);
    }
    auto each = [&](auto call) { held.each(call); };
    finish(held, each, shared);
  }

  template <int COUNT, bool NARROW>
  __device__ __forceinline__ void open(
      Held<COUNT, NARROW>& held, const typename Four<NARROW>::Words (&words)[COUNT]) const {
#pragma unroll
    for (int i = 0; i < COUNT; i++) {
      Four<NARROW>::open(words[i], row.p.type, held.values[i]);
#pragma unroll
      for (int j = 0; j < 4; j++) held.values[i][j] = score(held.values[i][j], 0.0f);
    }
  }

  template <bool NARROW_MASK, int COUNT, bool NARROW>
  __device__ __forceinline__ void open_masked(
      Held<COUNT, NARROW>& held, const typename Four<NARROW>::Words (&words)[COUNT]) const {
    typename Four<NARROW_MASK>::Words shown[COUNT];
    held.fetch(mask, shown);
#pragma unroll
    for (int i = 0; i < COUNT; i++) {
      float added[4];
      Four<NARROW>::open(words[i], row.p.type, held.values[i]);
      Four<NARROW_MASK>::open(shown[i], row.p.second_type, added);
#pragma unroll
      for (int j = 0; j < 4; j++) held.values[i][j] = score(held.values[i][j], added[j]);
    }
  }

  template <int N>
  __device__ __forceinline__ void run(Passing<N> passing, float* shared) {
    auto load_scores = [&](int column, float (&out)[N]) {
      float shown[N] = {};
      passing.get(x, row.p.inner[0], row.p.type, column, out);
      if (row.p.has_second) passing.get(mask, row.p.inner[2], row.p.second_type, column, shown);
      for (int i = 0; i < N; i++) out[i] = score(out[i], shown[i]);
    };
    auto each = [&](auto call) { passing.each(load_scores, call); };
    finish(passing, each, shared);
  }

  template <class R, class E>
  __device__ __forceinline__ void finish(const R& reading, E each, float* shared) {
    constexpr int N = R::EACH;
    const RowsParameters& p = row.p;
    float top = sink, total = 0.0f;
    each([&](float (&values)[N], int) {
      for (int i = 0; i < N; i++) top = fmaxf(top, values[i]);
    });
    // A NaN is never the largest score, but makes the total NaN.
    top = row_largest(top, shared, p.threads);
    each([&](float (&values)[N], int) {
      for (int i = 0; i < N; i++) total += values[i] = exp_of(values[i] - top);
    });
    total = row_sum(total, shared, p.threads);
    if (p.has_third) total += exp_of(sink - top);
    float part = 1.0f / total;
    each([&](float (&values)[N], int column) {
      float out[N];
      for (int i = 0; i < N; i++) out[i] = (R::HELD ? values[i] : exp_of(values[i] - top)) * part;
      reading.put(result, p.type, column, out);
    });
  }
};

enum Norm { LAYER_NORM = 0, RMS_NORM = 1, L2_NORM = 2 };

// Elements, minus their mean for a layer norm, over the root of their mean square, or over their
// length.
struct Normal {
  const Row& row;
  const u8 *x, *times, *plus, *added[MOST_ADDED];
  u8* result;

  __device__ __forceinline__ Normal(const Row& row) : row(row) {
    const RowsParameters& p = row.p;
    x = row.at(p.x, 0), result = row.at(p.result, 1);
    // Absent operands have the same layout as x, so one check covers all.
    times = p.has_second ? row.at(p.second, 2) : x, plus = p.has_third ? row.at(p.third, 3) : x;
#pragma unroll
    for (int i = 0; i < MOST_ADDED; i++) added[i] = i < p.adds ? row.at(p.added[i], 4 + i) : x;
  }

  __device__ __forceinline__ bool is_wide() const {
    int type = row.p.type;
    bool all = row.p.packed && row.is_wide(x, type) && row.is_wide(result, type) && row.is_wide(times, type) &&
               row.is_wide(plus, type);
#pragma unroll
    for (int i = 0; i < MOST_ADDED; i++) all = all && row.is_wide(added[i], type);
    return all;
  }

  template <int COUNT, bool NARROW>
  __device__ __forceinline__ void run(Held<COUNT, NARROW> held, float* shared) {
    using F = Four<NARROW>;
    typename F::Words words[COUNT], more[MOST_ADDED][COUNT];
    held.fetch(x, words);
#pragma unroll
    for (int i = 0; i < MOST_ADDED; i++)
      if (i < row.p.adds) held.fetch(added[i], more[i]);
#pragma unroll
    for (int i = 0; i < COUNT; i++) F::open(words[i], row.p.type, held.values[i]);
#pragma unroll
    for (int i = 0; i < MOST_ADDED; i++)
      if (i < row.p.adds)
#pragma unroll
        for (int j = 0; j < COUNT; j++) {
          float one[4];
          F::open(more[i][j], row.p.type, one);
#pragma unroll
          for (int k = 0; k < 4; k++)
            held.values[j][k] = rounded(__fadd_rn(held.values[j][k], one[k]), row.p.type);
        }
    auto each = [&](auto call) { held.each(call); };
    finish(held, each, shared);
  }

  template <int N>
  __device__ __forceinline__ void run(Passing<N> passing, float* shared) {
    auto load_sums = [&](int column, float (&out)[N]) {
      passing.get(x, row.p.inner[0], row.p.type, column, out);
#pragma unroll
      for (int i = 0; i < MOST_ADDED; i++)
        if (i < row.p.adds) {
          float one[N];
          passing.get(added[i], row.p.inner[4 + i], row.p.type, column, one);
          for (int j = 0; j < N; j++) out[j] = rounded(__fadd_rn(out[j], one[j]), row.p.type);
        }
    };
    auto each = [&](auto call) { passing.each(load_sums, call); };
    finish(passing, each, shared);
  }

  template <class R, class E>
  __device__ __forceinline__ void finish(const R& reading, E each, float* shared) {
    constexpr int N = R::EACH;
    const RowsParameters& p = row.p;
    float squares = 0.0f, mean = 0.0f, count = (float)p.columns;
    if (p.norm == LAYER_NORM) {
      each([&](float (&values)[N], int) {
        for (int i = 0; i < N; i++) mean += values[i];
      });
      mean = row_sum(mean, shared, p.threads) / count;
    }
    each([&](float (&values)[N], int) {
      for (int i = 0; i < N; i++) squares = fmaf(values[i] - mean, values[i] - mean, squares);
    });
    squares = row_sum(squares, shared, p.threads);
    float length = p.norm == L2_NORM ? larger(sqrtf(squares), p.scale) : sqrtf(squares / count + p.scale);
    float by = 1.0f / length;
    // Rounded as separate nodes would be: times a row, plus a row.
    each([&](float (&values)[N], int column) {
      float out[N], row_of[N];
      int type = p.type;
      for (int i = 0; i < N; i++) out[i] = rounded(__fmul_rn(values[i] - mean, by), type);
      if (p.has_second) {
        reading.get(times, p.inner[2], type, column, row_of);
        for (int i = 0; i < N; i++) out[i] = rounded(__fmul_rn(out[i], row_of[i]), type);
      }
      if (p.has_third) {
        reading.get(plus, p.inner[3], type, column, row_of);
        for (int i = 0; i < N; i++) out[i] = rounded(__fadd_rn(out[i], row_of[i]), type);
      }
      reading.put(result, type, column, out);
    });
  }
};

template <class Op, int COUNT>
static __device__ __forceinline__ void run_held(const RowsParameters& p) {
  __shared__ float shared[32];
  Row row(p);
  if (!row.is_there()) return;
  Op op(row);
  if (!op.is_wide())
    op.run(Passing<4>{row}, shared);
  else if (p.type == F32)
    op.run(Held<COUNT, false>{row}, shared);
  else
    op.run(Held<COUNT, true>{row}, shared);
}

// Rows that do not fit into registers, or whose length is not a multiple of four.
template <class Op>
static __device__ __forceinline__ void run_long(const RowsParameters& p) {
  __shared__ float shared[32];
  Row row(p);
  if (!row.is_there()) return;
  Op op(row);
  if (p.columns % 4 == 0)
    op.run(Passing<4>{row}, shared);
  else
    op.run(Passing<1>{row}, shared);
}

#define ROWS(name, Op)                                                     \
  KERNEL(name##_1, RowsParameters, 256) { run_held<Op, 1>(p); }            \
  KERNEL(name##_2, RowsParameters, 256) { run_held<Op, 2>(p); }            \
  KERNEL(name##_3, RowsParameters, 256) { run_held<Op, 3>(p); }            \
  KERNEL(name##_4, RowsParameters, 256) { run_held<Op, 4>(p); }            \
  KERNEL(name##_6, RowsParameters, 256) { run_held<Op, 6>(p); }            \
  KERNEL(name##_8, RowsParameters, 256) { run_held<Op, 8>(p); }            \
  KERNEL(name##_long, RowsParameters, 1024) { run_long<Op>(p); }
ROWS(soft_max, SoftMax)
ROWS(norm, Normal)
