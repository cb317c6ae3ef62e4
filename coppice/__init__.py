"""The vocabulary of all three services: trees, wire conversion, sampling parameters, errors, gRPC building.

No torch and no Redis here: the orchestrator imports this package and must stay light.
"""
