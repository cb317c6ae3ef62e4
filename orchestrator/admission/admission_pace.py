"""Pace at which requests got through lately: what a request that has to wait may expect."""

from __future__ import annotations

import statistics
from collections import deque

# What is remembered, and for how long it says something of the present.
MAX_KEPT = 256
MAX_AGE_S = 60.0
# Fewer than this say nothing certain.
MIN_SEEN = 16
# Of a shorter output most of the time is that of its prompt.
MIN_TOKENS = 8
# The delay that is named where nothing is known, and the bounds of any other.
DEFAULT_RETRY_S = 1.0
MIN_RETRY_S = 0.1
MAX_RETRY_S = 60.0
# How many of the requests that ended last say what is usual now.
NUM_USUAL = 32


class AdmissionPace:
    """Learns from requests as they give their places back. Times are seconds of any one clock."""

    def __init__(self) -> None:
        # When places were given back while somebody waited, one entry for each.
        self._given_back_s: deque[float] = deque(maxlen=MAX_KEPT)
        # For how long the requests that ended last had had their places.
        self._held_s: deque[float] = deque(maxlen=MAX_KEPT)
        # When longer outputs ended, and their seconds per token.
        self._per_token_s: deque[tuple[float, float]] = deque(maxlen=MAX_KEPT)
        # Of those that ended last, the tokens per second of all that ran with them, had they gone as fast.
        self._tokens_per_s: deque[float] = deque(maxlen=NUM_USUAL)
        # Of prompts that were read last, how many per second were while each was.
        self._prompts_per_s: deque[float] = deque(maxlen=NUM_USUAL)

    def ended(self, now_s: float, held_s: float, num_tokens: int) -> None:
        """A request has ended, its longest output after `num_tokens` tokens."""
        self._held_s.append(held_s)
        if num_tokens >= MIN_TOKENS:
            self._per_token_s.append((now_s, held_s / num_tokens))

    def shared(self, held_s: float, num_tokens: int, mean_running: float) -> None:
        """A request has ended, during which so many places were in use on average, its own among them."""
        if num_tokens >= MIN_TOKENS and held_s > 0:
            self._tokens_per_s.append(mean_running * num_tokens / held_s)

    def prompt_read(self, read_s: float, mean_reading: float) -> None:
        """A first token has come `read_s` after its start, while so many prompts were read on average, its own too."""
        if read_s > 0:
            self._prompts_per_s.append(mean_reading / read_s)

    def given_back(self, now_s: float, num_places: int) -> None:
        """Places became free that others wait for."""
        self._given_back_s.extend([now_s] * num_places)

    def nobody_waits(self) -> None:
        """From here on places are free because nobody wants them, which says nothing of the pace."""
        self._given_back_s.clear()

    def retry_after_s(self, num_wanted: int, num_places: int) -> float:
        """When `num_wanted` of all `num_places` will have been given back, as requests went lately."""
        if not self._held_s:
            return DEFAULT_RETRY_S
        mean_s = sum(self._held_s) / len(self._held_s)
        return min(max(num_wanted * mean_s / num_places, MIN_RETRY_S), MAX_RETRY_S)

    def usual_wait_s(self, num_wanted: int, num_places: int) -> float:
        """How long `num_wanted` of all `num_places` usually take to be given back; 0 where little is known."""
        usual = list(self._held_s)[-NUM_USUAL:]
        return num_wanted * sum(usual) / len(usual) / num_places if len(usual) >= MIN_SEEN else 0.0

    def places_within(self, token_s: float) -> int | None:
        """With how many places in use each output has a token in `token_s`, at the tokens per second of late.

        None where little is known; 1 where not even one alone has. With fewer in use there are fewer tokens per second
        in all, so that it never says too many, and says more as more are in use.
        """
        if len(self._tokens_per_s) < MIN_SEEN:
            return None
        # The median: a client that reads slowly keeps its place for long, and must not take those of others.
        return max(int(token_s * statistics.median(self._tokens_per_s)), 1)

    def prompts_within(self, read_s: float) -> int | None:
        """How many prompts that are read at once have their first tokens in `read_s`, at the pace of late.

        None where little is known; at least 1. As with places, it never says too many, and says more as more are read.
        """
        if len(self._prompts_per_s) < MIN_SEEN:
            return None
        return max(int(read_s * statistics.median(self._prompts_per_s)), 1)

    def reading_wait_s(self, num_prompts: int) -> float:
        """How long so many prompts usually take to be read; 0 where little is known."""
        if len(self._prompts_per_s) < MIN_SEEN:
            return 0.0
        return max(num_prompts, 0) / statistics.median(self._prompts_per_s)

    def at_least_s(self, now_s: float, num_wanted: int, num_tokens: int) -> float:
        """How long it takes at the best pace of the last minute to get `num_wanted` places, then `num_tokens` tokens.

        What cannot be said with certainty counts as nothing.
        """
        return self._places_s(now_s, num_wanted) + self._tokens_s(now_s, num_tokens)

    def _places_s(self, now_s: float, num_wanted: int) -> float:
        """The shortest time in which so many were given back in a row; the first may come at any moment."""
        given_back = [at_s for at_s in self._given_back_s if at_s >= now_s - MAX_AGE_S]
        if len(given_back) < MIN_SEEN or num_wanted < 1:
            return 0.0
        # A longer row than half of what was seen did not come often enough to judge by.
        row = min(num_wanted, len(given_back) // 2)
        quickest_s = min(last_s - first_s for first_s, last_s in zip(given_back, given_back[row - 1 :], strict=False))
        return quickest_s * (num_wanted // row)

    def _tokens_s(self, now_s: float, num_tokens: int) -> float:
        """The time of so many tokens, had they come as fast as the fastest output's."""
        per_token = [one_s for at_s, one_s in self._per_token_s if at_s >= now_s - MAX_AGE_S]
        return num_tokens * min(per_token) if len(per_token) >= MIN_SEEN else 0.0
