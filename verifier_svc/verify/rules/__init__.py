"""Rejection rules for sampled trees. `traversal` is the one that serves; the tests have others as oracles.

A rule has the shape `rule(tree, target, chance) -> Acceptance`: a tree whose nodes are draws from distributions
that it carries, the target's next-token probabilities [vocab, float64] after a node (ROOT or a node's index) with all
sampling parameters applied, and a source of chance that is independent of the tree's. Given the committed tokens
before it, the block has the target's own law.

A rule keeps the law of the output, not its tokens for a seed, and it trusts the drafter: distributions that the tree
was not drawn from bias the output. Sample-and-follow needs no distributions.
"""
