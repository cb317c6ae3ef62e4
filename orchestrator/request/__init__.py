"""One running request: rounds with the verifier and drafters, outputs, delivery.

For `orchestrator.api`.
"""
