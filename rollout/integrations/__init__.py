"""Official seams of trainers' frameworks, filled by this package; each imports its framework."""
