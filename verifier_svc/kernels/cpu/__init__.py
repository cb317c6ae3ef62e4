"""Kernels for CPUs: attention, products whose rows do not depend on their company, norms.

For `verifier_svc.model`.
"""
