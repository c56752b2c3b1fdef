// Random numbers by counter: Philox 4x32-10, "Parallel random numbers: as easy as 1, 2, 3", Salmon
// et al., 2011. The definition in `reference/randomness.py` gives the same bits.

struct RandomParameters {
  u64 seed;  // addresses
  u64 counter;
  u64 result;
  i64 count;
  int as_floats;  // else as bits
  int reserved;
};

KERNEL(philox, RandomParameters, 256) {
  u64 seed = *reinterpret_cast<const u64*>(p.seed), counter = *reinterpret_cast<const u64*>(p.counter);
  i64 step = (i64)gridDim.x * 256;
  for (i64 number = (i64)blockIdx.x * 256 + threadIdx.x; number * 4 < p.count; number += step) {
    u32 words[4] = {(u32)number, (u32)((u64)number >> 32), (u32)counter, (u32)(counter >> 32)};
    u32 first = (u32)seed, second = (u32)(seed >> 32);
#pragma unroll
    for (int round = 0; round < 10; round++) {
      u64 left = 0xD2511F53ull * words[0], right = 0xCD9E8D57ull * words[2];
      words[0] = (u32)(right >> 32) ^ words[1] ^ first, words[1] = (u32)right;
      words[2] = (u32)(left >> 32) ^ words[3] ^ second, words[3] = (u32)left;
      first += 0x9E3779B9u, second += 0xBB67AE85u;
    }
#pragma unroll
    for (int i = 0; i < 4; i++) {
      i64 at = number * 4 + i;
      if (at >= p.count) continue;
      // 24 bits are exact in f32.
      if (p.as_floats)
        reinterpret_cast<float*>(p.result)[at] = (float)(words[i] >> 8) * 5.9604644775390625e-8f;
      else
        reinterpret_cast<u32*>(p.result)[at] = words[i];
    }
  }
}
