"""The kinds of drafters, one file each, and what they share."""
