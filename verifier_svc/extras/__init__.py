"""Stages of a pass that may be left out: re-drafting and early pruning."""
