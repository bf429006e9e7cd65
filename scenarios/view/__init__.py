"""The HTML page of a run: what it shows (``data``), and the page around that (``page``, with its parts as files)."""
