"""Orchestrator, verifiers and drafters in one process, for laptops and the smallest deployment.

A package of its own at top level: it knows all three services, which shared code and services must not.
"""
