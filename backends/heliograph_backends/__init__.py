"""Backends: implementations of the device contract, and their shared parts.

Imports only `heliograph_proto`, without its codec.

contract      the abstract classes that a backend implements
host_memory   memory of this host: ordinary, and shared with other processes
planning      pure passes from a graph to steps in memory
reference     the definition of every op, in NumPy or CuPy
cpu cuda fake the backends; none imports another
registry      finds backends and starts their devices
conformance   the test suite for backends
"""
