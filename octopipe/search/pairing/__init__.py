"""Search for plans with pairs: decides partition, placement, order and pairs together, for ops with an exchange.

>>> from octopipe.search.pairing.search import PairSearch
"""
