"""Vector code: sixteen float32 lanes, atomics, elementary functions, loads and stores."""
