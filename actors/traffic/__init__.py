"""Traffic: where requests come from and when they become ready.

Readers turn a trace into sessions or into a graph of plays; drivers say which request is ready when, given how the
earlier ones ended. All of them are pure; ``actor.py`` connects one driver to the bus.
"""
