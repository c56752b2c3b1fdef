"""Sessions, devices, plans and tensors as notebooks show them."""
