"""The report of a refit, the line that is logged of it, and what a link says of itself."""
