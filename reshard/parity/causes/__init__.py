"""Why two systems differ: parts.py has what follows from scores, search.py makes the runs that tell causes apart."""
