"""Ways to other daemons over gRPC: what `core/exchanging` is given to fetch and to bring values with.

ways       channels, and what it means when they break
looping    on a daemon's event loop
blocking   on threads, for a process without one
probing    whether another daemon can be reached, and how fast
"""
