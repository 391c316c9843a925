"""The ranks of a run: processes, groups, meshes, the layers each holds and what they reduce."""
