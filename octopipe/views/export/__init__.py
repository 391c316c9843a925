"""Export of plans and timelines to other formats: terminal, SVG, PNG, CSV, Perfetto, PyTorch, Megatron."""
