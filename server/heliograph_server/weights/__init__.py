"""Contents of weights by digest: in device memory, on disk, in model files, and being uploaded.

Imports `resources`.
"""
