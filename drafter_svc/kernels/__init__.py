"""Kernels for drafts on CPUs: few rows, int8, a whole search in one call.

For `drafter_svc.drafters`.
"""
