"""How tests start processes: forked from servers that have imported large libraries."""
