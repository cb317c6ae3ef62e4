"""Orchestrator, verifiers and drafters in one process, for laptops and the smallest deployment.

It knows all three services, which shared rooms and services must not.
"""
