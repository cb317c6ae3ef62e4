"""Sample and follow: a lossless acceptance rule for any tree.

At the root and at each accepted node the target's own next token is drawn; if a child carries it, the walk continues
there, otherwise it ends (`algorithms` of SpecInfer's "naive sampling", Miao et al. 2305.09781; EAGLE's fixed-tree
rule). Tokens do not depend on the tree; the tree only decides how many are committed at once.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from coppice.core.tree import ROOT, TokenTree


@dataclass(frozen=True, slots=True)
class Acceptance:
    """Tokens of a round, the last being the bonus token, and accepted nodes, root to leaf.

    If the output ends at an accepted node, that node carries the last token and there is no bonus.
    """

    token_ids: tuple[int, ...]
    nodes: tuple[int, ...]

    @property
    def drawn_behind(self) -> tuple[int, ...]:
        """Node (or ROOT) from whose row each token was drawn.

        None was drawn after the last node of an output that ended there.
        """
        return (ROOT, *self.nodes)[: len(self.token_ids)]


def sample_and_follow(tree: TokenTree, draw: Callable[[int, int], int], is_last: Callable[[int], bool]) -> Acceptance:
    """Walk down `tree`, one draw per step.

    Args:
        tree: the draft.
        draw: the target's own token after a node (ROOT or a node's index) at a depth (0 for the root).
        is_last: called with every token in order; true if the output ends with it.
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
