"""`hg.compare`: one graph on two devices, node by node. Uses the public API."""
