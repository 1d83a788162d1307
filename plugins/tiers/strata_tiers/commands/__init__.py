"""``strata cache``: looks after folders of conversations without a server."""
