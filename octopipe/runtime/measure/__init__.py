"""Measurements on this machine: layers, links, timed runs of plans. Imports torch; independent of the training loop."""
