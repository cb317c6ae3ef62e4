"""Early pruning (ProPD): nodes that an early-exit head scores as unlikely are dropped during the pass.

For `verifier_svc.engine` and `verifier_svc.model`.
"""
