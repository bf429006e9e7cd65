"""The prefill/decode hand-off: who holds a prompt's KV when, and how it gets from one pool to the other."""
