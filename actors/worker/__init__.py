"""A worker: its scheduler, its GPU KV cache (G1), its pass times and its side of the host tier."""
