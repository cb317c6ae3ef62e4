"""Recipes for the drafters."""
