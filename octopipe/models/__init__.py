"""Models as lists of layers: layer kinds, presets, sequence lengths."""
