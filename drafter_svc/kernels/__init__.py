"""Kernels for drafts; `base` has the interface of a whole search in one call, with a folder per platform.

For `drafter_svc.model` and `drafter_svc.drafters`.
"""
