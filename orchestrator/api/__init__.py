"""The public gRPC API: requests are authenticated, checked and answered here.

Only `orchestrator.app` imports it.
"""
