"""Checkpoint directories: what they must hold, and whether a loaded model is all theirs.

For the verifier, the drafters and training.
"""
