"""Orchestrator, verifiers and drafters in one process, for laptops and minimal deployments.

The only package that may import all three services.
"""
