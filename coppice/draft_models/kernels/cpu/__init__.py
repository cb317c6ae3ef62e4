"""CPU kernels of drafters: a Llama pass with 8-bit weights, and a tree search over such passes.

For `coppice.draft_models` and `drafter_svc.model`. Kernels of targets, too, are in `coppice.kernels.cpu`.
"""
