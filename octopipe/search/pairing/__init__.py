"""Plans with pairs searched for: partition, placement, order and pairs decided together, where ops have an exchange.

>>> from octopipe.search.pairing.search import PairSearch
"""
