"""What all packages use: errors, limits, files, display, graphs, compiled kernels."""
