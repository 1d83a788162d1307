"""Host memory: how much there is, who holds it, and arenas that hand it out."""
