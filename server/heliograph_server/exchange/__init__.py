"""Values between daemons while a plan runs: offered by their producer, taken once.

Knows no gRPC. Imports `resources`.
"""
