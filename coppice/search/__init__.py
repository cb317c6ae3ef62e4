"""Search for the best draft tree, given scores of tokens.

For drafters and in-pass re-drafts. It depends on neither models nor services.
"""
