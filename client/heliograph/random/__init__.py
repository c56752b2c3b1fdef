"""Random numbers that a seed and a counter name: the same ones in every run and on every device.

There is no hidden state. A draw with another counter is another one, so the counter is an input of
the graph, or a variable that each run raises; two draws of one graph have different seeds. The bits
are those of Philox 4x32-10, `hg.ops.philox`; devices may round `normal` differently.

Imports `graph`.
"""

from heliograph.random.draws import bernoulli, normal, uniform

__all__ = ["bernoulli", "normal", "uniform"]
