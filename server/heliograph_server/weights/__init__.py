"""Contents of weights by digest: in devices' memory, on disk, in model files, and on their way.

Imports `resources`.
"""
