"""Plans and timelines in other people's formats: terminal, SVG, PNG, CSV, Perfetto, PyTorch, Megatron."""
