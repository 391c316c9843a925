"""The search's compiled part: a setting as arrays, orders built and timed, moves, and the loops that make them.

Two representations: a *structure with keys* (stages, ranks and a vector of priorities, decoded to orders by list
scheduling: decode.py) and *orders* (every rank's sequence, timed as it stands: follow.py).
"""
