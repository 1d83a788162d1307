"""The engine: requests, slots, agenda, sampling, the loop."""
