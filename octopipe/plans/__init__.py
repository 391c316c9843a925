"""Plans: their decisions, their validity rules, their file format, and the costs of their stages and ops."""
