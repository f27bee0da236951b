"""One digest for the same weights, wherever they are: `numbers` defines it, `result` names what differs."""
