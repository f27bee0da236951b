"""Estimate the GPU memory of a training layout, and of an RL step on it. Arithmetic only: no torch, no GPU.

`estimate.py` has the call, `report.py` what it returns. `stages.py` adds up a stage: `static.py` has what a
rank holds from its start (exact), `activations.py` what a layer keeps for its backward, `schedule.py` the
microbatches that are alive, `outside.py` bands for the rest. `phases.py` adds an engine for an RL step,
`fit.py` searches the layouts that fit.
"""
