"""What sessions share and use up: device time, memory, quotas, handles, measurements.

Imports `scheduler` alone.
"""
