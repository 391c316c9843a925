"""Proven lower bounds on the step time."""
