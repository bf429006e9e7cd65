"""The HTML page of a run: its data (``data``), and the page around them (``page``, ``page.html``, ``*.css``, ``*.js``)."""
