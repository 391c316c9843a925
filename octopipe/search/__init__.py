"""Decisions: published systems, the tuner, the exact solver, the planner of whole clusters."""
