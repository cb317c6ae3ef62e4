"""Drafts from memory: what has followed the same tokens before, in this request or in others of its tenant.

Nothing here is on a round's path, and nothing that goes wrong here can cost more than speed.
"""
