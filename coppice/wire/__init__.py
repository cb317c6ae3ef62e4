"""Conversion between protobuf and our types, and size limits checked before parsing.

For the edges of services, and for clients.
"""
