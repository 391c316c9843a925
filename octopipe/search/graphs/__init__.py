"""Search for plans whose paths fork and join: a head split by vocabulary over several ranks."""
