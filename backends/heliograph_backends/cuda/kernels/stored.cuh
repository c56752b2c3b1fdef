// Shared by products of few rows and of many: parameters, places of matrices, and moved rows.

struct ProductParameters {
  Walk walk;  // of the matrices
  i64 n;
  i64 k;
  i64 rows;
  Operand weights;
  Operand x;
  Operand result;
  Operand ids;  // of the matrices' experts; address 0: each has its own weights
  i64 experts;
  i64 expert_stride;  // bytes
  i64 weight_stride;  // bytes between rows
  i64 x_stride;
  i64 result_stride;
  i64 id_step;  // bytes between ids if evenly spaced; else 0
  // For few rows: groups of rows of weights of each block, and the number of blocks with one more.
  i64 groups;
  i64 larger_blocks;
  i64 chunk;  // elements of k whose activations are in shared memory at once, a multiple of STEP
  u64 failure;
  int node;
  int wide_ids;
  int warp_bits;  // of few rows: a block has 1 << warp_bits warps
  int reserved;
};

template <int T>
struct Narrow {
  enum { IS = T == F16 || T == BF16 };
};

// The places of matrices, and their expert, which may be out of range.
struct Matrices {
  const u8* weights;  // of the first expert
  const u8* x;
  u8* result;
  i64 expert;
};

static __device__ __forceinline__ i64 id_at(const ProductParameters& p, i64 offset) {
  const u8* place = reinterpret_cast<const u8*>(p.ids.address) + offset;
  if (p.wide_ids) return *reinterpret_cast<const i64*>(place);
  return *reinterpret_cast<const int*>(place);
}

static __device__ __forceinline__ Matrices find(const ProductParameters& p, i64 number) {
  i64 weights = 0, x = 0, result = 0, ids = 0;
#pragma unroll 1
  for (int axis = p.walk.dimensions - 1; axis >= 0; axis--) {
    i64 rest = number / p.walk.sizes[axis], place = number - rest * p.walk.sizes[axis];
    weights += place * p.weights.strides[axis], x += place * p.x.strides[axis];
    result += place * p.result.strides[axis], ids += place * p.ids.strides[axis];
    number = rest;
  }
  Matrices found;
  found.weights = reinterpret_cast<const u8*>(p.weights.address) + weights;
  found.x = reinterpret_cast<const u8*>(p.x.address) + x;
  found.result = reinterpret_cast<u8*>(p.result.address) + result;
  found.expert = p.ids.address ? id_at(p, ids) : 0;
  return found;
}

// True if the expert exists; if not, one thread reports it.
static __device__ __forceinline__ bool is_there(const ProductParameters& p, i64 expert, bool reports) {
  if (!p.ids.address || (expert >= 0 && expert < p.experts)) return true;
  if (reports) report(p.failure, p.node, expert);
  return false;
}

// Moves bytes to the beginning of their room. Words move down, so no lane reads a word that another
// wrote.
static __device__ __forceinline__ void move_down(u8* room, int skew, int bytes, int lane) {
  const u32 which = 0x3210 + 0x1111 * (skew % 4);
  u32* words = reinterpret_cast<u32*>(room);
#pragma unroll 1
  for (int at = 0; at < bytes / 4; at += 32) {
    int own = at + lane, from = own + skew / 4;
    bool mine = own < bytes / 4;
    u32 found = mine ? bytes_of(words[from], words[from + 1], which) : 0;
    __syncwarp();
    if (mine) words[own] = found;
  }
  __syncwarp();
}
