"""Plans: what would fit and what would pay, worked out before a machine is hired."""
