"""The HTTP server: a Flask application over one engine, and the runners that serve it."""
