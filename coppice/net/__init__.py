"""gRPC servers and channels: building, TLS, tokens, and the guard in front of a server.

For services and clients. It knows no service's messages.
"""
