"""KV blocks: how they are identified, and the events that say where they are."""
