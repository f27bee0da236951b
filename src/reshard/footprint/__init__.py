"""What a training layout, and an RL step on it, needs of each GPU's memory. Arithmetic only: no torch, no GPU.

`estimate.memory` puts it together: `static.py` what a rank holds from its start (exact), `activations.py` what
a layer keeps for its backward, `schedule.py` which microbatches are alive, `outside.py` what no formula says,
as bands; `phases.py` an RL step with an engine; `fit.py` which layouts fit.
"""
