"""Kernels for drafts; `base` is the interface of a whole search in one call, a folder per platform.

For `drafter_svc.model` and `drafter_svc.drafters`.
"""
