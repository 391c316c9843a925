"""The ranks of a run: processes, groups, meshes, the layers of each rank, and gradient reduction."""
