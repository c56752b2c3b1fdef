// Kernels that move elements: strided copies, get_rows, set_rows and its relatives.

struct CopyParameters {
  Divisor divisors[MOST_DIMENSIONS];
  i64 from_strides[MOST_DIMENSIONS];
  i64 to_strides[MOST_DIMENSIONS];
  u64 from;
  u64 to;
  u32 count;
  int dimensions;
  int item_bytes;
  int reserved;
};

#define COPY_THREADS 256
#define COPY_AHEAD 4

static __device__ __forceinline__ void find_places(const CopyParameters& p, u32 index, const u8*& from, u8*& to) {
  from = reinterpret_cast<const u8*>(p.from), to = reinterpret_cast<u8*>(p.to);
#pragma unroll
  for (int axis = MOST_DIMENSIONS - 1; axis > 0; axis--) {
    if (axis >= p.dimensions) continue;
    u32 above = divided(index, p.divisors[axis]);
    u32 at = index - above * p.divisors[axis].size;
    from += at * p.from_strides[axis], to += at * p.to_strides[axis];
    index = above;
  }
  from += index * p.from_strides[0], to += index * p.to_strides[0];
}

// Items are as wide as rows and strides allow: see `moves.py`. A thread has several in flight.
template <typename Item>
static __device__ __forceinline__ void copy_items(const CopyParameters& p) {
  const u32 tile = COPY_THREADS * COPY_AHEAD;
  u32 step = gridDim.x * tile;
  for (u32 first = blockIdx.x * tile + threadIdx.x; first < p.count; first += step) {
    Item items[COPY_AHEAD];
    u8* to[COPY_AHEAD];
#pragma unroll
    for (int i = 0; i < COPY_AHEAD; i++) {
      const u8* from;
      u32 index = first + i * COPY_THREADS;
      find_places(p, index, from, to[i]);
      if (index < p.count) items[i] = *reinterpret_cast<const Item*>(from);
    }
#pragma unroll
    for (int i = 0; i < COPY_AHEAD; i++)
      if (first + i * COPY_THREADS < p.count) *reinterpret_cast<Item*>(to[i]) = items[i];
  }
}

KERNEL(copy_elements, CopyParameters, COPY_THREADS) {
  switch (p.item_bytes) {
    case 1: copy_items<u8>(p); break;
    case 2: copy_items<u16>(p); break;
    case 4: copy_items<u32>(p); break;
    case 8: copy_items<u64>(p); break;
    default: copy_items<uint4>(p);
  }
}

// For sources whose rows are the result's columns: `across` runs along the source's rows, `along`
// along the result's.
struct TransposeParameters {
  Divisor divisors[MOST_DIMENSIONS];  // of the other dimensions
  i64 from_strides[MOST_DIMENSIONS];
  i64 to_strides[MOST_DIMENSIONS];
  Divisor tiles[2];  // their numbers across and along
  u64 from;
  u64 to;
  i64 from_step;  // bytes between the source's rows
  i64 to_step;    // and the result's
  u32 across;
  u32 along;
  int dimensions;
  int item_bytes;
};

#define TRANSPOSE_TILE 64
#define TRANSPOSE_ROWS (COPY_THREADS / TRANSPOSE_TILE)

// A tile is read by rows and written by columns. Rows in shared memory are padded by a word or an
// item, so that the items of a column lie in different banks.
template <typename Item>
static __device__ __forceinline__ void transpose_items(const TransposeParameters& p, u64* shared) {
  typedef Item Row[TRANSPOSE_TILE + (sizeof(Item) < 4 ? 4 / sizeof(Item) : 1)];
  Row* tile = reinterpret_cast<Row*>(shared);
  u32 rest = divided(blockIdx.x, p.tiles[0]);
  u32 across = (blockIdx.x - rest * p.tiles[0].size) * TRANSPOSE_TILE;
  u32 outer = divided(rest, p.tiles[1]);
  u32 along = (rest - outer * p.tiles[1].size) * TRANSPOSE_TILE;
  const u8* from = reinterpret_cast<const u8*>(p.from) + along * p.from_step;
  u8* to = reinterpret_cast<u8*>(p.to) + across * p.to_step;
#pragma unroll 1
  for (int axis = p.dimensions - 1; axis >= 0; axis--) {
    u32 above = divided(outer, p.divisors[axis]);
    u32 at = outer - above * p.divisors[axis].size;
    from += at * p.from_strides[axis], to += at * p.to_strides[axis];
    outer = above;
  }
  u32 x = threadIdx.x % TRANSPOSE_TILE, y = threadIdx.x / TRANSPOSE_TILE;
  if (across + x < p.across) {
    u32 rows = p.along - along;
    from += (u64)(across + x) * sizeof(Item) + y * p.from_step;
#pragma unroll
    for (u32 row = 0; row < TRANSPOSE_TILE; row += TRANSPOSE_ROWS, from += TRANSPOSE_ROWS * p.from_step)
      if (row + y < rows) tile[row + y][x] = *reinterpret_cast<const Item*>(from);
  }
  // Threads read the items of others once, after this barrier, and the block ends then.
  __syncthreads();
  if (along + x < p.along) {
    u32 rows = p.across - across;
    to += (u64)(along + x) * sizeof(Item) + y * p.to_step;
#pragma unroll
    for (u32 row = 0; row < TRANSPOSE_TILE; row += TRANSPOSE_ROWS, to += TRANSPOSE_ROWS * p.to_step)
      if (row + y < rows) *reinterpret_cast<Item*>(to) = tile[x][row + y];
  }
}

KERNEL(copy_transposed, TransposeParameters, COPY_THREADS) {
  DYNAMIC_SHARED(u64, shared);
  switch (p.item_bytes) {
    case 1: transpose_items<u8>(p, shared); break;
    case 2: transpose_items<u16>(p, shared); break;
    case 4: transpose_items<u32>(p, shared); break;
    default: transpose_items<u64>(p, shared);
  }
}

struct GatherParameters {
  Walk walk;  // of the indices; the other operands have strides over it, 0 for the gathered dimension
  i64 count;
  i64 columns;    // elements of a row
  i64 there;      // rows of the table
  Operand table;  // read by get_rows, written by set_rows
  Operand rows;   // the result of get_rows, read by set_rows
  Operand indices;
  i64 table_stride;  // bytes between the rows of the table
  i64 inner[2];      // bytes between the elements of a row of the table, and of the rows
  u64 failure;
  int node;
  int item_bytes;  // if rows are moved unchanged
  int wide_indices;
  int last;  // of the walk: indices that set rows of the same matrix
};

static __device__ __forceinline__ i64 index_at(const GatherParameters& p, i64 number) {
  const u8* place = row_of(p.walk, p.indices, number);
  return p.wide_indices ? *reinterpret_cast<const i64*>(place) : (i64)*reinterpret_cast<const int*>(place);
}

// The row's number in the table, or -1 after a report.
static __device__ __forceinline__ i64 checked(const GatherParameters& p, i64 number) {
  i64 index = index_at(p, number);
  if (index >= 0 && index < p.there) return index;
  if (threadIdx.x == 0) report(p.failure, p.node, index);
  return -1;
}

template <typename Item>
static __device__ __forceinline__ void move_row(
    const u8* from, i64 from_step, u8* to, i64 to_step, i64 columns) {
  for (i64 c = threadIdx.x; c < columns; c += blockDim.x)
    *reinterpret_cast<Item*>(to + c * to_step) = *reinterpret_cast<const Item*>(from + c * from_step);
}

static __device__ __forceinline__ void move_items(
    int item_bytes, const u8* from, i64 from_step, u8* to, i64 to_step, i64 columns) {
  i64 bytes = columns * item_bytes;
  if (from_step == item_bytes && to_step == item_bytes && ((u64)from | (u64)to | (u64)bytes) % 16 == 0) {
    move_row<uint4>(from, 16, to, 16, bytes / 16);
    return;
  }
  switch (item_bytes) {
    case 1: move_row<u8>(from, from_step, to, to_step, columns); break;
    case 2: move_row<u16>(from, from_step, to, to_step, columns); break;
    case 4: move_row<u32>(from, from_step, to, to_step, columns); break;
    default: move_row<u64>(from, from_step, to, to_step, columns);
  }
}

// Rows unchanged.
KERNEL(get_rows_plain, GatherParameters, 256) {
  for (i64 number = blockIdx.x; number < p.count; number += gridDim.x) {
    i64 index = checked(p, number);
    if (index < 0) continue;
    const u8* from = row_of(p.walk, p.table, number) + index * p.table_stride;
    move_items(p.item_bytes, from, p.inner[0], row_of(p.walk, p.rows, number), p.inner[1], p.columns);
  }
}

// Narrow floats, widened.
KERNEL(get_rows_narrow, GatherParameters, 256) {
  for (i64 number = blockIdx.x; number < p.count; number += gridDim.x) {
    i64 index = checked(p, number);
    if (index < 0) continue;
    const u8* from = row_of(p.walk, p.table, number) + index * p.table_stride;
    u8* to = row_of(p.walk, p.rows, number);
    for (i64 c = threadIdx.x; c < p.columns; c += blockDim.x)
      store(to + c * p.inner[1], F32, load(from + c * p.inner[0], p.table.type));
  }
}

template <int T>
static __device__ __forceinline__ void get_rows_of_blocks(const GatherParameters& p) {
  for (i64 number = blockIdx.x; number < p.count; number += gridDim.x) {
    i64 index = checked(p, number);
    if (index < 0) continue;
    const u8* from = row_of(p.walk, p.table, number) + index * p.table_stride;
    u8* to = row_of(p.walk, p.rows, number);
    for (i64 part = threadIdx.x; part < p.columns / 32; part += blockDim.x) {
      float values[32];
      part_of<T>(from, part, values);
#pragma unroll
      for (int i = 0; i < 32; i++) store(to + (part * 32 + i) * p.inner[1], F32, values[i]);
    }
  }
}

#define GET_ROWS(T, name) \
  KERNEL(get_rows_##name, GatherParameters, 256) { get_rows_of_blocks<T>(p); }
GET_ROWS(Q4_0, q4_0)
GET_ROWS(Q4_1, q4_1)
GET_ROWS(Q5_0, q5_0)
GET_ROWS(Q5_1, q5_1)
GET_ROWS(Q8_0, q8_0)
GET_ROWS(Q2_K, q2_k)
GET_ROWS(Q3_K, q3_k)
GET_ROWS(Q4_K, q4_k)
GET_ROWS(Q5_K, q5_k)
GET_ROWS(Q6_K, q6_k)
GET_ROWS(IQ4_NL, iq4_nl)
GET_ROWS(IQ4_XS, iq4_xs)
GET_ROWS(MXFP4, mxfp4)
GET_ROWS(TQ1_0, tq1_0)
GET_ROWS(TQ2_0, tq2_0)
GET_ROWS(IQ1_S, iq1_s)
GET_ROWS(IQ1_M, iq1_m)
GET_ROWS(IQ2_XXS, iq2_xxs)
GET_ROWS(IQ2_XS, iq2_xs)
GET_ROWS(IQ2_S, iq2_s)
GET_ROWS(IQ3_XXS, iq3_xxs)
GET_ROWS(IQ3_S, iq3_s)
GET_ROWS(NVFP4, nvfp4)

// Of equal indices the later row counts, so a row looks for its index after itself.
KERNEL(set_rows, GatherParameters, 256) {
  for (i64 number = blockIdx.x; number < p.count; number += gridDim.x) {
    i64 index = checked(p, number);
    if (index < 0) continue;
    i64 end = (number / p.last + 1) * p.last;
    int again = 0;
    for (i64 later = number + 1 + threadIdx.x; later < end; later += blockDim.x) again |= index_at(p, later) == index;
    if (__syncthreads_or(again)) continue;
    u8* to = row_of(p.walk, p.table, number) + index * p.table_stride;
    const u8* from = row_of(p.walk, p.rows, number);
    if (p.item_bytes) {
      move_items(p.item_bytes, from, p.inner[1], to, p.inner[0], p.columns);
      continue;
    }
    for (i64 c = threadIdx.x; c < p.columns; c += blockDim.x)
      store(to + c * p.inner[0], p.table.type, load(from + c * p.inner[1], p.rows.type));
  }
}

struct Sum { static __device__ float of(float a, float b) { return a + b; } };
struct Product { static __device__ float of(float a, float b) { return a * b; } };
struct Larger { static __device__ float of(float a, float b) { return larger(a, b); } };
struct Smaller { static __device__ float of(float a, float b) { return smaller(a, b); } };

// The first row of an index combines all rows of that index with the table's, in their order.
template <typename Combine>
static __device__ __forceinline__ void combine_rows(const GatherParameters& p) {
  for (i64 number = blockIdx.x; number < p.count; number += gridDim.x) {
    i64 index = checked(p, number);
    if (index < 0) continue;
    i64 first = number / p.last * p.last;
    int before = 0;
    for (i64 at = first + threadIdx.x; at < number; at += blockDim.x) before |= index_at(p, at) == index;
    if (__syncthreads_or(before)) continue;
    u8* to = row_of(p.walk, p.table, number) + index * p.table_stride;
    for (i64 c = threadIdx.x; c < p.columns; c += blockDim.x) {
      float value = load(to + c * p.inner[0], p.table.type);
      for (i64 at = number; at < first + p.last; at++)
        if (index_at(p, at) == index)
          value = Combine::of(value, load(row_of(p.walk, p.rows, at) + c * p.inner[1], p.rows.type));
      store(to + c * p.inner[0], p.table.type, value);
    }
  }
}

KERNEL(add_rows, GatherParameters, 256) { combine_rows<Sum>(p); }
KERNEL(mul_rows, GatherParameters, 256) { combine_rows<Product>(p); }
KERNEL(max_rows, GatherParameters, 256) { combine_rows<Larger>(p); }
KERNEL(min_rows, GatherParameters, 256) { combine_rows<Smaller>(p); }
