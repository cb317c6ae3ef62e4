"""Clients of verifiers and drafters: streams, pools, routing.

For `orchestrator.request` and `orchestrator.app`.
"""
