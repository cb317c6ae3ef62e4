"""CPU kernels of the verifier: attention, and products whose rows do not depend on other rows.

For `verifier_svc.model` and `verifier_svc.extras`. What the drafters need as well is in `coppice.kernels.cpu`.
"""
