"""What everything else stands on: boxes, placements, plans. Pure: imports nothing of the rest."""
