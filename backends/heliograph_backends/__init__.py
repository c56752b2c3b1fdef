"""What runs a graph on hardware.

`contract` holds the abstract classes that a backend implements; `registry` finds the backends;
`definition` is the living definition of every op in NumPy (or CuPy); `planning` holds the pure passes
that turn a graph into steps; `cpu` and `fake` are backends.
"""
