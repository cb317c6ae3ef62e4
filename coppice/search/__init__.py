"""Search for the best tree, given scores of tokens.

For drafters, and for the verifier's re-drafting. It knows neither models nor services.
"""
