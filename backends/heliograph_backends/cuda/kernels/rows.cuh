// Ops along rows: soft_max, norm, rms_norm and l2_norm. A warp or a block has one row, and keeps it
// in registers if it fits: then each element is read once, and all of a thread's loads are in
// flight before the first is needed.
//
// The elements that a thread adds depend only on the row's length, and so do a sum's last bits.

#define MOST_ADDED 2

// An operand's first row, and the bytes to the next one where rows have one dimension.
struct Line {
  u64 address;
  i64 step;
};

// The fields that small runs read come first: each 64 bytes of parameters that a kernel touches are
// fetched separately.
struct RowsParameters {
  Line x;
  Line result;  // of x's type
  int rows;
  int columns;
  int threads;     // of a row: 32, or the block's
  int dimensions;  // of the rows
  int packed;      // true if the elements of each row are contiguous
  int has_second;
  int has_third;
  int adds;  // the number of `added`
  int type;  // of x
  int norm;
  float scale;  // of norms: eps
  float max_bias;
  Line second;             // the mask, or the factor of a norm
  Line third;              // the sinks, or the summand of a norm
  Line added[MOST_ADDED];  // added to x before a norm, each rounded
  int second_type;
  int third_type;
  int heads;  // of soft_max: matrices of `matrix_rows` rows with their own slopes and sinks
  int matrix_rows;
  float slope_power;  // the largest power of 2 up to heads
  int reserved;
  i64 inner[4 + MOST_ADDED];  // bytes between the elements of a row of x, result, second, third, added
  i64 sizes[MOST_DIMENSIONS];
  i64 strides[4 + MOST_ADDED][MOST_DIMENSIONS];
};

// For rows that have a warp each.
#define WARP_ROWS 4

struct Row {
  const RowsParameters& p;
  u32 number;
  int thread;

  __device__ __forceinline__ Row(const RowsParameters& p) : p(p) {
    // A row for each warp, or one for the block. Threads are numbered within their row.
    bool by_warp = p.threads == 32;
    number = by_warp ? blockIdx.x * WARP_ROWS + threadIdx.x / 32 : blockIdx.x;
    thread = by_warp ? threadIdx.x % 32 : threadIdx.x;
  }

  __device__ __forceinline__ bool is_there() const { return number < (u32)p.rows; }

  // `place`: the operand's index in `strides`.
  __device__ __forceinline__ u8* at(const Line& line, int place) const {
    u8* start = in_memory(line.address);
    if (p.dimensions <= 1) return start + number * line.step;
    u32 index = number;
#pragma unroll 1
    for (int axis = p.dimensions - 1; axis > 0; axis--) {
      u32 size = (u32)p.sizes[axis], rest = index / size;
      start += (index - rest * size) * p.strides[place][axis];
      index = rest;
    }
    return start + index * p.strides[place][0];
  }

  // True if all operands can be read and written four elements at a time.
  __device__ __forceinline__ bool is_wide(const u8* place, int type) const {
    return (u32)(u64)place % (type == F32 ? 16 : 8) == 0;
  }
};

// A thread's elements of a row in registers: COUNT groups of four contiguous ones; a group of each
// thread comes before the next groups.
template <int COUNT, bool NARROW> struct Held {
  using F = Four<NARROW>;
  enum { EACH = 4, HELD = true };
  const Row& row;
  float values[COUNT][4];

  __device__ __forceinline__ int column(int i) const { return (i * row.p.threads + row.thread) * 4; }
  __device__ __forceinline__ bool has(int i) const { return column(i) < row.p.columns; }

  // All words of this thread's part of a row, loaded at once.
  template <class Words>
  __device__ __forceinline__ void fetch(const u8* from, Words (&out)[COUNT]) const {
    const Words nothing = {};
#pragma unroll
    for (int i = 0; i < COUNT; i++)
      out[i] = has(i) ? *reinterpret_cast<const Words*>(from + column(i) * (int)(sizeof(Words) / 4)) : nothing;
  }

  template <class C>
  __device__ __forceinline__ void each(C call) {
#pragma unroll
    for (int i = 0; i < COUNT; i++)
      if (has(i)) call(values[i], column(i));
  }

  __device__ __forceinline__ void put(u8* to, int type, int column, const float (&out)[4]) const {
    *reinterpret_cast<typename F::Words*>(to + column * F::SIZE) = F::close(type, out);
  }

  __device__ __forceinline__ void get(const u8* from, i64, int type, int column, float (&out)[4]) const {
    F::open(*reinterpret_cast<const typename F::Words*>(from + column * F::SIZE), type, out);
  }
};

// The same elements, read anew in each pass, with any strides.
template <int N> struct Passing {
  enum { EACH = N, HELD = false };
  const Row& row;

  template <class L, class C>
  __device__ __forceinline__ void each(L load_values, C call) {
    for (int column = row.thread * N; column < row.p.columns; column += row.p.threads * N) {
      float values[N];
      load_values(column, values);
      call(values, column);
    }
  }

  __device__ __forceinline__ void put(u8* to, int type, int column, const float (&out)[N]) const {
#pragma unroll
    for (int i = 0; i < N; i++) store(to + (column + i) * row.p.inner[1], type, out[i]);
  }

  __device__ __forceinline__ void get(const u8* from, i64 inner, int type, int column, float (&out)[N]) const {
#pragma unroll
    for (int i = 0; i < N; i++) out[i] = load(from + (column + i) * inner, type);
  }
};
