"""

hat cases are made of: operands, guarded memory, expected values, and a device under test with
bounded waits.
"""
