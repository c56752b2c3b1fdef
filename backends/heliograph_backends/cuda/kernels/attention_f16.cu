// The attention kernels for keys and values in f16.

ATTENTION(F16, f16, 32)
ATTENTION(F16, f16, 64)
ATTENTION(F16, f16, 96)
ATTENTION(F16, f16, 128)
ATTENTION(F16, f16, 256)
