"""Attention on GPUs, in Triton.

For `verifier_svc.model`.
"""
