"""How long a round may wait for its draft. Pure."""

from __future__ import annotations


def worthwhile_linger_s(gain: float, rate: float, num_running: int) -> float:
    """The longest wait that a draft of `gain` expected tokens makes good, at `rate` tokens per second of all requests.

    A round that stays out while others go on misses its share of the rate, rate / num_running; where all of them wait,
    all of the rate is lost, and all of their drafts gained. Both give the same limit. For one request alone it says:
    (1 + gain) / (wait + pass) >= 1 / pass.
    """
    return gain * num_running / rate
