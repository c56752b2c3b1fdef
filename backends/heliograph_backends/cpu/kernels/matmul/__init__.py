"""Matrix products with f32 and stored weights."""
