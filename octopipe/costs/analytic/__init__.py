"""Costs from first principles: work, traffic, memory, calibrated by published runs."""
