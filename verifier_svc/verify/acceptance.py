"""Sample and follow: the lossless acceptance rule for any tree.

At the root and at each accepted node the target's own next token is drawn; if a child carries it, the walk goes on
there, otherwise it ends (`algorithms` of SpecInfer's "naive sampling", Miao et al. 2305.09781; EAGLE's fixed-tree
rule). The tokens are the target's own whatever the tree holds; the tree only decides how many come at once.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from coppice.core.tree import ROOT, TokenTree


@dataclass(frozen=True, slots=True)
class Acceptance:
    """The tokens of a round, the last of them the bonus token, and the accepted nodes, root to leaf.

    When the output ended inside the block, the last accepted node carries the last token and there is no bonus.
    """

    token_ids: tuple[int, ...]
    nodes: tuple[int, ...]

    @property
    def drawn_behind(self) -> tuple[int, ...]:
        """The node (or ROOT) that each token was drawn behind: the one before it.

        An output that ended inside the block drew nothing behind its last node.
        """
        return (ROOT, *self.nodes)[: len(self.token_ids)]


def sample_and_follow(tree: TokenTree, draw: Callable[[int, int], int], is_last: Callable[[int], bool]) -> Acceptance:
    """Walk down `tree`, one draw per step.

    Args:
        tree: the draft.
        draw: the target's own token after a node (ROOT or a node's index) at a depth (0 for the root).
        is_last: called with every token in order; true when the output ends with it.
    """
    node = ROOT
    token_ids: list[int] = []
    nodes: list[int] = []
    while True:
        token = draw(node, len(token_ids))
        token_ids.append(token)
        child = tree.children.get((node, token))
        if child is not None:
            nodes.append(child)
        if is_last(token) or child is None:
            return Acceptance(tuple(token_ids), tuple(nodes))
        node = child
