"""Drafts from memory: continuations of the same tokens in this request, or in others of its tenant.

For `orchestrator.request` and `orchestrator.app`. It is off the rounds' critical path; its failures only cost speed.
"""
