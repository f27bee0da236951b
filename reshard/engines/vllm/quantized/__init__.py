"""Layers that vLLM does not serve from plain weights.

- `layers`: how vLLM quantizes and loads a layer, and which kernel serves it.
- `fp8`: blocks of 128x128, which a refit quantizes while it copies; a check that vLLM makes the
  same bits.
- `reload`: a slab that a refit fills with plain weights, and vLLM's own processing of them into
  what each layer serves from, in place, in rounds. `reprocessing` has vLLM process one layer;
  `processing` is how vLLM does that.
- `recipes`: makes of plain weights what a layer is loaded from, where that is quantized;
  `compressed` for compressed-tensors in fp8, int8 and packed codes, `nvfp4` for nvfp4.
"""
