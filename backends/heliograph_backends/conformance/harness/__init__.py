"""The parts of cases: operands, guarded memory, expected values, and a device under test."""
