"""`coppice bench ablation --suite in-pass`: what the target's own drafts and early pruning gain."""
