"""Convolutions and pools: windows of images as panels of a matrix product, or one after the
other."""
