"""What drafters usually promise: accepted tokens of their trees, as they say themselves."""

from __future__ import annotations

from coppice.core.tree import TokenTree

# Weight of a tree in the running mean of an output, and of all.
_RATE_OF_OUTPUT = 0.2
_RATE_OF_ALL = 0.02


class CachePromise:
    """A running mean over trees; 0 before the first."""

    def __init__(self, tokens: float = 0.0, rate: float = _RATE_OF_ALL, of_all: CachePromise | None = None) -> None:
        self.tokens = tokens
        self._rate = rate
        self._of_all = of_all

    def of_output(self) -> CachePromise:
        """What one output goes by: it begins with what all others do, and tells them."""
        return CachePromise(self.tokens, _RATE_OF_OUTPUT, self)

    def add(self, tree: TokenTree) -> None:
        """Count drafters' tree. An empty one promises nothing, and says nothing of others."""
        if len(tree):
            self._count(tree.expected_tokens)

    def _count(self, promised: float) -> None:
        self.tokens += (self._rate if self.tokens else 1.0) * (promised - self.tokens)
        if self._of_all is not None:
            self._of_all._count(promised)
