"""The search over whole-cluster splits: tensor, context, expert, pipeline and data parallelism together.

Knows: which splits a cluster allows, how to estimate them quickly, and how the best few are simulated and tuned. Does
not know: the command line.
"""
