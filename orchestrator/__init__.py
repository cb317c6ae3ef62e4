"""The orchestrator: the public API, the loop of one request, and the streams to verifier and drafters.

No torch, no transformers, no Redis client is ever imported here, and neither is another service.
"""
