"""Running plans for real: the rooms that may import torch (with `octopipe.nn`)."""
