"""The trace of an engine's own loader: which elements of published tensors it would write where.

Read in this order:

1. `trace`: runs a loader with tensors that have shapes but no bytes, and records its copies.
2. `rows`: which boxes and rows of published tensors its views are.
3. `stand_ins`: tensors without memory in the place of a live model's, for a loader to write to.
4. `canonical`: the published tensors that it is given.
5. `deduplicated`: one of many layers that are loaded alike is traced, and stands for the others.
6. `views`: copies of tensors as files have them, as copies of the parts that a trainer holds.
"""
