"""Where a rank of an engine holds which canonical boxes: by rules that the trace of its own loader must bear out."""
