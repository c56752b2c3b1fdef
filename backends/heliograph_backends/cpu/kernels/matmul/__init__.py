"""Matrix products with f32 and stored weights. Imports `elementwise`, `vector` and `program`."""
