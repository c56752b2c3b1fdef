"""Values between daemons while a plan runs: offered by their producer, taken once.

Independent of gRPC. Imports `resources`.
"""
