"""The LoRA adapters that vLLM serves beside its weights (``enable_lora``), as the destination of a refit.

`live` is the `Engine`: it finds in `targets` which rows and columns of which adapter a rank multiplies by,
from what its weights are, takes them into memory of its own (`stages`), and writes them into one of vLLM's slots.
`versions` gives each version an id of its own, under which vLLM's manager serves it. Names of vLLM that are no part of
its interface are in `compat`.
"""
