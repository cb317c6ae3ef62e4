"""Cache of keys and values of prompt prefixes, shared by sequences.

Prompts are read in pieces of one length, counted from the first token, so a piece's rows depend on the tokens up to
its end only, bit for bit. They are stored under a digest of those tokens and the salt; a copy gives the same drafts.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from coppice.core.prefix_digests import first_digest, longer_digest

# Rows of a piece. Larger ones are hardly faster (640 tokens of the bundled model: 12 to 14 ms with 128 and 256 rows,
# 20 with 64), and waste more of a prefix at its end.
PIECE_ROWS = 128


@dataclass(frozen=True, slots=True)
class KvBlock:
    """Keys and values of one piece; `content` is specific to the forward, and takes `num_bytes`."""

    content: Any
    num_bytes: int


class PrefixBlocks:
    """LRU cache of blocks by the digest of all tokens up to their end, in bounded memory.

    For the model thread, except for the counts.
    """

    def __init__(self, max_bytes: int) -> None:
        """`max_bytes` 0 disables it."""
        self.max_bytes = max_bytes
        self.num_bytes = 0
        # Tokens copied instead of read.
        self.num_reused_tokens = 0
        self._blocks: OrderedDict[bytes, KvBlock] = OrderedDict()

    @property
    def shared_block_tokens(self) -> int:
        """Tokens per block; 0 if disabled."""
        return PIECE_ROWS if self.max_bytes else 0

    def find(self, digests: Sequence[bytes]) -> KvBlock | None:
        """The block that ends at the last digest; the blocks before it count as used."""
        block = self._blocks.get(digests[-1])
        if block is not None:
            self.num_reused_tokens += PIECE_ROWS
            self._touch(digests)
        return block

    def add(self, digests: Sequence[bytes], block: KvBlock) -> None:
        """Add a block after those before it, within the memory limit."""
        if digests[-1] not in self._blocks:
            self._blocks[digests[-1]] = block
            self.num_bytes += block.num_bytes
        self._touch(digests)
        while self.num_bytes > self.max_bytes:
            _, left = self._blocks.popitem(last=False)
            self.num_bytes -= left.num_bytes

    def _touch(self, digests: Sequence[bytes]) -> None:
        # Later blocks need the earlier ones, so they are evicted first.
        for digest in reversed(digests):
            if digest in self._blocks:
                self._blocks.move_to_end(digest)


class PrefixKey:
    """Digests of the whole pieces that one sequence has read from its start."""

    def __init__(self, blocks: PrefixBlocks, salt: str) -> None:
        self._blocks = blocks
        self._salt = salt
        self._digests: list[bytes] = []

    def anew(self) -> PrefixKey:
        """A key for an empty cache."""
        return PrefixKey(self._blocks, self._salt)

    def follows(self, num_rows: int) -> bool:
        """Whether a piece after `num_rows` rows is the next of the prefix, and caching is on."""
        return num_rows == len(self._digests) * PIECE_ROWS and self._blocks.shared_block_tokens > 0

    def find(self, piece: Sequence[int]) -> KvBlock | None:
        """Cached block of the next piece, which then joins the prefix; None if there is none."""
        self._digests.append(self._digest(piece))
        block = self._blocks.find(self._digests)
        if block is None:
            self._digests.pop()
        return block

    def add(self, piece: Sequence[int], block: KvBlock) -> None:
        """Share the next piece, which the sequence has read."""
        self._digests.append(self._digest(piece))
        self._blocks.add(self._digests, block)

    def _digest(self, piece: Sequence[int]) -> bytes:
        return longer_digest(self._digests[-1] if self._digests else first_digest(self._salt), piece)
