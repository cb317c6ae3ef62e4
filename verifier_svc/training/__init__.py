"""Recipes for what the verifier runs."""
