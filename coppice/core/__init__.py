"""Types shared by all services: trees, noise, sampling parameters, tokenizer, errors.

Importable from everywhere. It depends on neither protobuf, gRPC stubs, torch nor Redis.
"""
