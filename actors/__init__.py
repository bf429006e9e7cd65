"""The domain: KV blocks, workers, the host pool, routers and traffic.

Each role has pure state machines in ordinary modules and a thin shell in ``actor.py``.
Nothing in here knows about files, YAML or terminals.
"""
