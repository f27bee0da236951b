"""Boxes, placements, plans, and what all packages share. Imports nothing of the rest."""
