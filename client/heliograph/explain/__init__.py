"""`plan.explain()`: reports with names, as tables, Graphviz pictures and traces. May import `graph`."""
