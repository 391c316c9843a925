"""Plans whose paths fork and join, searched for: a head cut by its vocabulary over several ranks."""
