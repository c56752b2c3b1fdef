// Rows in order: sorted, their largest element, their sums so far.

// Beside the floats of `Type`.
#define WHOLE_NUMBERS 3

// The order of elements as a number: of equal ones -0 and 0, and all that are no numbers, which come
// last. Bits alone decide, so that numbers that count as 0 stay apart.
static __device__ __forceinline__ u32 rank_of(const u8* place, int type) {
  if (type == WHOLE_NUMBERS) return *reinterpret_cast<const u32*>(place) ^ 0x80000000u;
  u32 bits = type == F32 ? *reinterpret_cast<const u32*>(place) : (u32)__float_as_int(load(place, type));
  u32 size = bits & 0x7fffffffu;
  if (size > 0x7f800000u) return 0xffffffffu;
  if (!size) return 0x80000000u;
  return bits & 0x80000000u ? ~bits : bits | 0x80000000u;
}

struct SortParameters {
  Walk walk;  // of rows
  Operand x;
  i64 step;    // bytes between the elements of a row
  u64 keys;    // of chunks that were sorted before, instead of x
  u64 found;   // what is kept of each chunk: keys
  u64 result;  // or places
  int columns;
  int chunks;  // of a row
  int chunk;   // elements of a chunk
  int padded;  // those and more up to a power of two
  int kept;    // of each chunk
  int descending;
  int reads_keys;
  int keeps_keys;
};

// A block sorts one chunk in shared memory. A key is an element's rank and its place in the row, so
// that no two are equal and the order has no choice. Bitonic: "Sorting networks and their
// applications", Batcher, 1968.
KERNEL(sort_rows, SortParameters, 512) {
  DYNAMIC_SHARED(u64, keys);
  u32 row = blockIdx.x / (u32)p.chunks, first = (blockIdx.x - row * p.chunks) * (u32)p.chunk;
  const u8* x = p.reads_keys ? nullptr : row_of(p.walk, p.x, row);
  const u64* given = reinterpret_cast<const u64*>(p.keys) + (u64)row * p.columns;
  for (u32 i = threadIdx.x; i < (u32)p.padded; i += blockDim.x) {
    u32 place = first + i;
    u64 key = ~0ull;
    if (i < (u32)p.chunk && place < (u32)p.columns) {
      if (p.reads_keys) {
        key = given[place];
      } else {
        u32 rank = rank_of(x + place * p.step, p.x.type);
        key = (u64)(p.descending ? ~rank : rank) << 32 | place;
      }
    }
    keys[i] = key;
  }
  for (u32 size = 2; size <= (u32)p.padded; size *= 2)
    for (u32 apart = size / 2; apart; apart /= 2) {
      __syncthreads();  // each pair is one thread's, and has the last step's keys
      for (u32 i = threadIdx.x; i < (u32)p.padded / 2; i += blockDim.x) {
        u32 low = 2 * i - (i & (apart - 1)), high = low + apart;
        u64 one = keys[low], other = keys[high];
        if ((one > other) == ((low & size) == 0)) keys[low] = other, keys[high] = one;
      }
    }
  __syncthreads();  // all keys are in order
  for (u32 i = threadIdx.x; i < (u32)p.kept; i += blockDim.x) {
    u64 to = (u64)blockIdx.x * p.kept + i;
    if (p.keeps_keys)
      reinterpret_cast<u64*>(p.found)[to] = keys[i];
    else
      reinterpret_cast<u32*>(p.result)[to] = (u32)keys[i];
  }
}

struct LargestParameters {
  Walk walk;  // of rows
  Operand x;
  i64 step;
  u64 result;
  i64 rows;
  i64 columns;
};

// The first of the largest: the higher its rank the larger a key, and the later its place the
// smaller.
KERNEL(argmax, LargestParameters, 256) {
  __shared__ u64 keys[256];
  for (i64 row = blockIdx.x; row < p.rows; row += gridDim.x) {
    const u8* x = row_of(p.walk, p.x, row);
    u64 best = 0;
    for (i64 c = threadIdx.x; c < p.columns; c += blockDim.x) {
      u64 key = (u64)rank_of(x + c * p.step, p.x.type) << 32 | (u32)~(u32)c;
      best = key > best ? key : best;
    }
    __syncthreads();  // thread 0 has read the last row's
    keys[threadIdx.x] = best;
    for (u32 half = blockDim.x / 2; half; half /= 2) {
      __syncthreads();  // the upper half of the last step is there, and no more written
      if (threadIdx.x < half && keys[threadIdx.x + half] > keys[threadIdx.x])
        keys[threadIdx.x] = keys[threadIdx.x + half];
    }
    if (threadIdx.x == 0) reinterpret_cast<int*>(p.result)[row] = (int)~(u32)keys[0];
  }
}

struct RunningParameters {
  Walk walk;  // of rows
  Operand x;
  Operand result;
  i64 steps[2];  // bytes between the elements of a row of each
  i64 rows;
  i64 columns;
  int is_product;
  int reserved;
};

#define EACH 4  // elements of a thread beside each other

struct RunningFloats {
  typedef float Value;
  __device__ static Value get(const u8* place, int type) { return load(place, type); }
  __device__ static void put(u8* place, int type, Value value) { store(place, type, value); }
};
template <typename Whole>
struct RunningNumbers {
  typedef Whole Value;
  __device__ static Value get(const u8* place, int) { return *reinterpret_cast<const Whole*>(place); }
  __device__ static void put(u8* place, int, Value value) { *reinterpret_cast<Whole*>(place) = value; }
};

// Sums or products of each row up to each element. A block has a row, and walks it tile by tile:
// threads combine their own elements, then the threads before them, then the tiles before. The
// order depends on the row's length alone.
template <typename Numbers>
static __device__ __forceinline__ void run_along(const RunningParameters& p) {
  typedef typename Numbers::Value Value;
  __shared__ Value totals[2][256];
  auto combined = [&](Value a, Value b) { return p.is_product ? a * b : a + b; };
  for (i64 row = blockIdx.x; row < p.rows; row += gridDim.x) {
    const u8* x = row_of(p.walk, p.x, row);
    u8* result = row_of(p.walk, p.result, row);
    Value before = p.is_product ? 1 : 0;  // of the tiles before
    for (i64 first = 0; first < p.columns; first += (i64)blockDim.x * EACH) {
      i64 start = first + (i64)threadIdx.x * EACH;
      Value own[EACH];
#pragma unroll
      for (int i = 0; i < EACH; i++) {
        own[i] = p.is_product ? 1 : 0;
        if (start + i < p.columns) own[i] = Numbers::get(x + (start + i) * p.steps[0], p.x.type);
        if (i) own[i] = combined(own[i - 1], own[i]);
      }
      // Two halves in turn, so that nobody overwrites what another still reads.
      int half = 0;
      __syncthreads();  // the last tile's totals are read
      totals[0][threadIdx.x] = own[EACH - 1];
      for (u32 apart = 1; apart < blockDim.x; apart *= 2, half ^= 1) {
        __syncthreads();  // this half is there
        Value value = totals[half][threadIdx.x];
        if (threadIdx.x >= apart) value = combined(totals[half][threadIdx.x - apart], value);
        totals[half ^ 1][threadIdx.x] = value;
      }
      __syncthreads();  // all totals are there
      Value so_far = threadIdx.x ? combined(before, totals[half][threadIdx.x - 1]) : before;
      before = combined(before, totals[half][blockDim.x - 1]);
#pragma unroll
      for (int i = 0; i < EACH; i++)
        if (start + i < p.columns)
          Numbers::put(result + (start + i) * p.steps[1], p.result.type, combined(so_far, own[i]));
    }
  }
}

KERNEL(running_floats, RunningParameters, 256) { run_along<RunningFloats>(p); }
KERNEL(running_i32, RunningParameters, 256) { run_along<RunningNumbers<u32>>(p); }
KERNEL(running_i64, RunningParameters, 256) { run_along<RunningNumbers<u64>>(p); }
