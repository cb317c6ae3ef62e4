"""The engine: schedule a batch, run the pass, settle the round of each sequence.

For `verifier_svc.stream` and `verifier_svc.app`. Start reading at `engine.Engine.step`.
"""
