"""Checkpoint directories: checks of their files and of loaded models; GGUF conversion.

For the verifier, the drafters and training.
"""
