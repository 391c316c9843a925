"""What layers cost: cost tables, and every place they can come from."""
