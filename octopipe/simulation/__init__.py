"""Lowering of plans to programs, simulation of their time and memory, timelines, and lower bounds."""
