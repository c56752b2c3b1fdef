"""`plan.explain()`: reports as tables, Graphviz pictures and traces. May import `graph`."""
