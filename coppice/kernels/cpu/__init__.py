"""CPU kernels shared by services: compiler, sums, exponentials, norms, products, top-k, memory and threads.

For the services' kernels, `coppice.core` and `coppice.search`. Kernels of a single service are in its own package.
"""
