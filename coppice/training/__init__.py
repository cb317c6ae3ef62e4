"""Shared parts of the training recipes: corpus, tokenizer, token store, resumable loop, model card.

Serving code never imports this package; the recipes are in the packages of the models that they train
(`verifier_svc/training`, `drafter_svc/training`).
"""
