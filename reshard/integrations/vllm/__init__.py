"""vLLM's own weight transfer with the backend ``reshard``: the trainer's side in `transfer`, the engine's in
`worker`."""
