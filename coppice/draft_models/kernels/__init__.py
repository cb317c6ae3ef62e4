"""Kernels for drafts; `base` has the interface of a whole search in one call, with a folder per platform.

For `coppice.draft_models`, `drafter_svc.model` and `drafter_svc.drafters`.
"""
