"""The adaptive planner: what passes cost, what drafts are worth, and what follows for the next round."""
