"""Routers: which rank of which worker a request goes to."""
