"""Code shared by the services, and tools around them: client, command line, benchmarks, colocated deployment.

Packages imported by the orchestrator depend on neither torch nor Redis; pyproject.toml has the import contracts.
"""
