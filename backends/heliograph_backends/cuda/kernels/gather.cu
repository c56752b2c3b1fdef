// What moves elements: strided copies, rows that are gathered, and rows that are set.

struct CopyParameters {
  Walk walk;
  i64 count;
  Operand source;
  Operand result;
  int item_bytes;
  int reserved;
};

template <typename Item>
static __device__ __forceinline__ void copy_items(const CopyParameters& p) {
  i64 step = (i64)gridDim.x * blockDim.x;
  for (i64 index = (i64)blockIdx.x * blockDim.x + threadIdx.x; index < p.count; index += step)
    *reinterpret_cast<Item*>(row_of(p.walk, p.result, index)) =
        *reinterpret_cast<const Item*>(row_of(p.walk, p.source, index));
}

KERNEL(copy_elements, CopyParameters, 256) {
  switch (p.item_bytes) {
    case 1: copy_items<u8>(p); break;
    case 2: copy_items<u16>(p); break;
    case 4: copy_items<u32>(p); break;
    default: copy_items<u64>(p);
  }
}

struct GatherParameters {
  Walk walk;  // of the indices; the other operands have its strides, with 0 where the gathered dimension is
  i64 count;
  i64 columns;    // elements of a row
  i64 there;      // how many rows there are to choose from
  Operand table;  // get_rows: what is read; set_rows: what is written
  Operand rows;   // get_rows: the result; set_rows: what is read
  Operand indices;
  i64 table_stride;  // bytes between the rows of the table
  i64 inner[2];      // bytes between the elements of a row of the table, and of the rows
  u64 failure;
  int node;
  int item_bytes;  // where rows are moved as they are
  int wide_indices;
  int last;  // of the walk: indices that set rows of the same matrix
};

static __device__ __forceinline__ i64 index_at(const GatherParameters& p, i64 number) {
  const u8* place = row_of(p.walk, p.indices, number);
  return p.wide_indices ? *reinterpret_cast<const i64*>(place) : (i64)*reinterpret_cast<const int*>(place);
}

// The row's number in the table, or -1 with a report.
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
  switch (item_bytes) {
    case 1: move_row<u8>(from, from_step, to, to_step, columns); break;
    case 2: move_row<u16>(from, from_step, to, to_step, columns); break;
    case 4: move_row<u32>(from, from_step, to, to_step, columns); break;
    default: move_row<u64>(from, from_step, to, to_step, columns);
  }
}

// Rows as they are.
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

// Of an index that comes twice the later row stays, so a row looks for its index behind itself.
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
