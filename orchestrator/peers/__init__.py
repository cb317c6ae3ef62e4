"""Verifiers and drafters as the orchestrator sees them: streams, pool, routing.

For `orchestrator.request` and `orchestrator.app`.
"""
