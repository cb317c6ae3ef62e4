"""The target model: loading, tree attention, one pass over a batch of trees, probes of exactness.

For `verifier_svc.engine`.
"""
