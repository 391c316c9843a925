"""The compiled part of the search: costs as arrays, construction and timing of orders, moves, and the main loops.

Two representations: a *structure with keys* (stages, ranks and a vector of priorities, decoded to orders by list
scheduling: decode.py) and *orders* (every rank's sequence, timed as given: follow.py).
"""
