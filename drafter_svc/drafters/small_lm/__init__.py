"""The small LM drafter: a best-first tree, a few batched steps of a small model."""
