"""Grammars: compiled off the model's thread, cached in bounded memory, advanced token by token.

For `verifier_svc.stream` and `verifier_svc.engine`.
"""
