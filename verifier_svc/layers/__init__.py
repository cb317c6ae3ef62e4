"""Layer kinds beyond attention and plain products: mixtures of experts, and layers with a recurrent state.

For `verifier_svc.model`. A kind says which modules of a model are its own and replaces what they compute.
"""
