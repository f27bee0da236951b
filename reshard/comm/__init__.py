"""How processes meet and talk: authenticated connections to a hub, on which everything else here is built."""
