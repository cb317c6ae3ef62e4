"""Rejection rules for sampled trees: lossless like sample-and-follow, and in need of the drafter's distributions.

Every rule has the shape `rule(tree, target, chance) -> Acceptance`: a tree whose nodes are draws from distributions
that it carries, the target's next-token probabilities [vocab, float64] after a node (ROOT or a node's index) with all
sampling parameters applied, and a source of chance that is independent of the tree's. Given the committed tokens
before it, the block has the target's own law.

They keep the law of the output, not its tokens for a seed, and they believe the drafter: distributions that are not
what the tree was drawn from bias the output. Sample-and-follow needs neither belief nor distributions.
"""
