"""Model families, one file each, written on the compute contract."""
