"""Loops compiled for CPUs, and how memory and threads are set up for them.

Shared by the verifier and the drafters. Whoever serves on GPUs never needs it.
"""
