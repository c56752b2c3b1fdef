"""What the library does over the wire, step by step, for both APIs: upload, compile, run, tap, rebuild.

May import `core`.
"""
