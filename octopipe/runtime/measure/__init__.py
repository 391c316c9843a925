"""Measuring on this machine: layers, links, plans run and timed. Imports torch; knows no training loop."""
