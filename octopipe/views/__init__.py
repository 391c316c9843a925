"""What people look at: exports, the report, the reproduction of the paper."""
