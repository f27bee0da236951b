"""The live homes of weights, loaded from disk and saved to it by all ranks at once."""
