"""Shared code of the services, and what surrounds them: client, command line, benchmarks, one-process form.

Rooms that the orchestrator imports know neither torch nor Redis; pyproject.toml has the import contracts.
"""
