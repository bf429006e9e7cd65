"""The message bus: virtual clock, ordered envelopes, actors, topics and the event log.

Nothing in here knows about LLM serving.
"""
