"""Resources that sessions share: device time, memory, quotas, handles, measurements.

Imports `scheduler` alone.
"""
