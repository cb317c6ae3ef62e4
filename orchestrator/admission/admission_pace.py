"""Recent throughput of admitted requests, to predict waits."""

from __future__ import annotations

import statistics
from collections import deque

# Samples kept, and their maximum age in seconds where age matters.
MAX_KEPT = 256
MAX_AGE_S = 60.0
# Samples needed for an estimate.
MIN_SEEN = 16
# Shorter outputs are dominated by prefill.
MIN_TOKENS = 8
# Retry delay without samples, and bounds of the estimate, in seconds.
DEFAULT_RETRY_S = 1.0
MIN_RETRY_S = 0.1
MAX_RETRY_S = 60.0
# Recent samples that an average covers.
NUM_USUAL = 32


class AdmissionPace:
    """Estimates from requests that end. Times are seconds of any one clock."""

    def __init__(self) -> None:
        # Times at which places were freed while requests waited, one entry per place.
        self._given_back_s: deque[float] = deque(maxlen=MAX_KEPT)
        # Seconds each request held its places.
        self._held_s: deque[float] = deque(maxlen=MAX_KEPT)
        # End times and seconds per token of outputs with at least MIN_TOKENS.
        self._per_token_s: deque[tuple[float, float]] = deque(maxlen=MAX_KEPT)
        # Estimated total tokens per second while each recent request ran: its own rate times the mean concurrency.
        self._tokens_per_s: deque[float] = deque(maxlen=NUM_USUAL)
        # Prompts per second during each recent prefill: its own rate times the mean number of prefills.
        self._prompts_per_s: deque[float] = deque(maxlen=NUM_USUAL)

    def ended(self, now_s: float, held_s: float, num_tokens: int) -> None:
        """Record the end of a request whose longest output has `num_tokens` tokens."""
        self._held_s.append(held_s)
        if num_tokens >= MIN_TOKENS:
            self._per_token_s.append((now_s, held_s / num_tokens))

    def shared(self, held_s: float, num_tokens: int, mean_running: float) -> None:
        """Record the mean number of places in use during a request, its own included."""
        if num_tokens >= MIN_TOKENS and held_s > 0:
            self._tokens_per_s.append(mean_running * num_tokens / held_s)

    def prompt_read(self, read_s: float, mean_reading: float) -> None:
        """Record a prefill of `read_s` seconds during which `mean_reading` prefills ran on average, itself included."""
        if read_s > 0:
            self._prompts_per_s.append(mean_reading / read_s)

    def given_back(self, now_s: float, num_places: int) -> None:
        """Record places freed while requests wait."""
        self._given_back_s.extend([now_s] * num_places)

    def nobody_waits(self) -> None:
        """Forget freed places: while nothing waits, idle places would look like slow ones."""
        self._given_back_s.clear()

    def retry_after_s(self, num_wanted: int, num_places: int) -> float:
        """Expected seconds until `num_wanted` of `num_places` are freed, within MIN_RETRY_S and MAX_RETRY_S."""
        if not self._held_s:
            return DEFAULT_RETRY_S
        mean_s = sum(self._held_s) / len(self._held_s)
        return min(max(num_wanted * mean_s / num_places, MIN_RETRY_S), MAX_RETRY_S)

    def usual_wait_s(self, num_wanted: int, num_places: int) -> float:
        """Mean seconds until `num_wanted` of `num_places` are freed; 0 with too few samples."""
        usual = list(self._held_s)[-NUM_USUAL:]
        return num_wanted * sum(usual) / len(usual) / num_places if len(usual) >= MIN_SEEN else 0.0

    def places_within(self, token_s: float) -> int | None:
        """Largest concurrency at which each output has a token per `token_s`, at the recent total throughput.

        None with too few samples; at least 1. Total throughput grows with concurrency, so an estimate made below the
        limit is too low rather than too high, and rises as concurrency does.
        """
        if len(self._tokens_per_s) < MIN_SEEN:
            return None
        # The median: clients that read slowly hold places for long and must not lower the limit for others.
        return max(int(token_s * statistics.median(self._tokens_per_s)), 1)

    def prompts_within(self, read_s: float) -> int | None:
        """Most concurrent prefills whose first tokens come within `read_s` seconds, at the recent rate.

        None with too few samples; at least 1. Like `places_within`, it errs on the low side and rises with concurrency.
        """
        if len(self._prompts_per_s) < MIN_SEEN:
            return None
        return max(int(read_s * statistics.median(self._prompts_per_s)), 1)

    def reading_wait_s(self, num_prompts: int) -> float:
        """Expected seconds until `num_prompts` prefills end; 0 with too few samples."""
        if len(self._prompts_per_s) < MIN_SEEN:
            return 0.0
        return max(num_prompts, 0) / statistics.median(self._prompts_per_s)

    def at_least_s(self, now_s: float, num_wanted: int, num_tokens: int) -> float:
        """Lower bound in seconds for `num_wanted` places and `num_tokens` tokens, at the best recent rate (MAX_AGE_S).

        A part with too few samples counts as 0.
        """
        return self._places_s(now_s, num_wanted) + self._tokens_s(now_s, num_tokens)

    def _places_s(self, now_s: float, num_wanted: int) -> float:
        """Shortest time in which `num_wanted` places were freed in a row; the first may come at once."""
        given_back = [at_s for at_s in self._given_back_s if at_s >= now_s - MAX_AGE_S]
        if len(given_back) < MIN_SEEN or num_wanted < 1:
            return 0.0
        # A row longer than half of the samples occurred too rarely to judge by.
        row = min(num_wanted, len(given_back) // 2)
        quickest_s = min(last_s - first_s for first_s, last_s in zip(given_back, given_back[row - 1 :], strict=False))
        return quickest_s * (num_wanted // row)

    def _tokens_s(self, now_s: float, num_tokens: int) -> float:
        """Time of `num_tokens` tokens at the rate of the fastest recent output."""
        per_token = [one_s for at_s, one_s in self._per_token_s if at_s >= now_s - MAX_AGE_S]
        return num_tokens * min(per_token) if len(per_token) >= MIN_SEEN else 0.0
