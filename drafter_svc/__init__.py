"""The drafter service: proposes token trees behind the committed tokens of many sequences."""
