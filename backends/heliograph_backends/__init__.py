"""Backends: implementations of the device contract, and what they share.

Imports `heliograph_proto` alone, without its codec.
contract      the abstract classes that a backend implements
host_memory   memory of this host: ordinary, and shared with other processes
planning      pure passes from a graph to steps in memory
reference     the definition of every op, in NumPy or CuPy
cpu cuda fake the backends; none imports another
registry      finds backends and starts their devices
conformance   the suite that tells whether a backend is right
"""
