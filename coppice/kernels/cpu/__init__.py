"""Shared parts of all services' CPU kernels: compiler, sums, exponentials, norms, products, top-k, memory and threads.

For kernels of the services, `coppice.core` and `coppice.search`. What only one service computes is in its own room.
"""
