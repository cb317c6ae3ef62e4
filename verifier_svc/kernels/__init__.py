"""Attention and products; `base` is the interface, a folder per platform.

For `verifier_svc.model` and `verifier_svc.extras`.
"""
