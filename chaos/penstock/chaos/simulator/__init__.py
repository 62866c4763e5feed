"""The seeded simulator: whole clusters of pure cores in virtual time."""
