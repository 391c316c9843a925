"""What every room uses: errors, limits, files, display, graphs, compiled kernels."""
