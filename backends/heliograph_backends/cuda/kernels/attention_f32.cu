// The attention kernels for keys and values in f32.

ATTENTION(F32, f32, 32)
ATTENTION(F32, f32, 64)
ATTENTION(F32, f32, 128)
ATTENTION(F32, f32, 256)
