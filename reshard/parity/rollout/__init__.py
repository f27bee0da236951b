"""Rollouts of a training run: the logprobs that trainer and inference engine give the same tokens.

tokens.py   the tokens that count, from arrays, tensors or ragged lists
weights.py  what the logprobs of sampled tokens estimate: the KL, importance weights and their tails
parts.py    the parts of a difference by ratio, experts and staleness, which add up to the whole
check.py    check_rollout(), one step
monitor.py  RolloutMonitor, which appends each step of a run to a file
run.py      reads that file; html.py makes a page of it
"""
