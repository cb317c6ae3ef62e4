"""Trees, noise, sampling parameters, tokenizer, errors: the types that every service shares.

Anyone may import it. It knows neither protobuf, gRPC, torch nor Redis.
"""
