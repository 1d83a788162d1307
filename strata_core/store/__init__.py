"""The level contract and the RAM level."""
