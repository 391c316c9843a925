"""Devices, links, nodes, and the set-up of a run over them."""
