"""Drafts from memory: continuations of the same tokens in this request, or in others of its tenant.

For `orchestrator.request` and `orchestrator.app`. Nothing here is on a round's path, and a failure costs speed alone.
"""
