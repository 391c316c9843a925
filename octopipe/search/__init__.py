"""Searches for plans: published systems, the tuner, the exact solver, the planner for whole clusters."""
