"""A checkpoint of any format, read by an engine's own loader or straight to where its tensors lie."""
