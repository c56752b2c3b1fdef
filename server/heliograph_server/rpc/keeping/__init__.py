"""The states of other daemons, which this one keeps in its memory: `runtime/keeper.py` decides."""
