"""Draft models: checkpoints, forwards, caches, the thread that runs them.

For `drafter_svc.drafters` and `drafter_svc.service`.
"""
