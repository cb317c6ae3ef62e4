"""EAGLE heads in the verifier's own process: drafts made where the target's states are.

For `verifier_svc.engine` and `verifier_svc.model`.
"""
