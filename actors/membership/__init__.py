"""Workers that crash and come back, and workers that routers lose sight of for a while."""
