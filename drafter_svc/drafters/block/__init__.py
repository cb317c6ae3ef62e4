"""Drafters of whole blocks: semi-autoregressive heads and masked diffusion."""
