"""Public gRPC API: authentication, validation and `InferenceService`.

Only `orchestrator.app` imports it.
"""
