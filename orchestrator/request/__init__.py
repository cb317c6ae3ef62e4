"""One running request: its rounds with the verifier and the drafters, its outputs, its delivery.

For `orchestrator.api`.
"""
