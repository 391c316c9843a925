"""Plans: what a plan decides, what makes one wrong, its file, and what its parts cost."""
