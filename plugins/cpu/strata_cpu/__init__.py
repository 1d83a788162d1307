"""Native kernels for the CPU: backend ``cpu`` of Strata."""
