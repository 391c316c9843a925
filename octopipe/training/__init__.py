"""Training runs: the loop, its data, its checkpoints, plans that adapt. Imports torch; knows no measuring of layers."""
