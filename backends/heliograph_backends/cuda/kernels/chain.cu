// The kernel of a chain: see `chain.cuh`.

// COUNT vectors of this thread, THREADS apart. The result may use an operand's memory: a thread
// writes a vector after it has read it, and no other thread reads it.
template <int COUNT>
static __device__ __forceinline__ void compute(const ChainParameters& p, const Once& once, u32 first) {
  Inputs<VECTOR> inputs[COUNT];
  Places<VECTOR, ChainParameters> places[COUNT];
  UNROLLED for (int ahead = 0; ahead < COUNT; ahead++) {
    places[ahead].find(p, first + ahead * THREADS);
    inputs[ahead].load(p, first, ahead, places[ahead]);
  }
  UNROLLED for (int ahead = 0; ahead < COUNT; ahead++) {
    float values[VECTOR];
    chained(p, once, inputs[ahead], values);
    put(p, first, ahead, places[ahead], values);
  }
}

// The elements after the last whole vector. Rows consist of whole vectors, so they have none.
static __device__ __forceinline__ void compute_rest(const ChainParameters& p, const Once& once) {
  if (VECTOR == 1 || ChainParameters::WALKS || blockIdx.x != 0 || threadIdx.x >= p.rest) return;
  u64 element = (u64)p.vectors * VECTOR + threadIdx.x;
  Inputs<1> input;
  Places<1, ChainParameters> nowhere;
  float value[1];
  input.load(p, element, 0, nowhere);
  chained(p, once, input, value);
  put(p, element, 0, nowhere, value);
}

KERNEL(chain, ChainParameters, THREADS) {
  Once once(p);
  for (u32 tile = blockIdx.x; tile < p.tiles; tile += gridDim.x) {
    u32 first = tile * (THREADS * AHEAD) + threadIdx.x;
    if ((tile + 1) * (THREADS * AHEAD) <= p.vectors) {
      compute<AHEAD>(p, once, first);
    } else {
#pragma unroll 1
      for (u32 vector = first; vector < p.vectors; vector += THREADS) compute<1>(p, once, vector);
    }
  }
  compute_rest(p, once);
}
