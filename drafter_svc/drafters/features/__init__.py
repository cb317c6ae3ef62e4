"""Drafters on the target's hidden states."""
