"""How long a text may become, where the KV cache holds less than the model's context."""

from __future__ import annotations

import logging

from coppice.core.errors import IncompatibleError
from verifier_svc.engine.kv_cache import BLOCK_SIZE
from verifier_svc.extras.redraft.redraft import RedraftSettings

logger = logging.getLogger(__name__)

# A token of a prompt and one behind it: with less, every request would be refused.
_LEAST_CONTEXT = 2


def context_that_fits(limit: int, num_blocks: int, max_nodes: int, redraft: RedraftSettings | None) -> int:
    """The longest text, of at most `limit` tokens, that `num_blocks` blocks hold beside all rows of a round behind it.

    Raises:
        IncompatibleError: there is no room for any.
    """
    rows = max_nodes + (redraft.shape.max_rows if redraft is not None else 0)
    held = num_blocks * BLOCK_SIZE
    if held - rows >= limit:
        return limit
    if held - rows < _LEAST_CONTEXT:
        raise IncompatibleError(
            f"the KV cache holds {held} tokens and a round may add {rows} rows, which leaves no room for a text: "
            "raise KV_CACHE_MIB or lower MAX_NODES"
        )
    logger.warning("the KV cache holds less than a context of %d tokens: requests have %d", limit, held - rows)
    return held - rows
