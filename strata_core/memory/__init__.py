"""Host memory: how much there is, and arenas that hand it out."""
