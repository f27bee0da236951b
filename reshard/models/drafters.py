"""What a drafter's tensors are called beside those of the model that it drafts for."""

# Begins the canonical names of a drafter's tensors; the published name follows.
DRAFTER = "drafter."
# Which tokens of the model a drafter has: how far each of its own is from the model's, and for each of the model's
# whether it is one. The second follows from the first, and engines pass over it.
D2T, T2D = "d2t", "t2d"
