"""Optional stages of a pass: re-drafting and early pruning.

For `verifier_svc.engine` and `verifier_svc.model`. Without an adapter and a head nothing of them runs.
"""
