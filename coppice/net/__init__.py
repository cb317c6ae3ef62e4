"""gRPC servers and channels: construction, TLS, tokens, and the guard in front of servers.

For services and clients. Independent of the services' messages.
"""
