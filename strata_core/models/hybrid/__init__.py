"""What models of recurrent and attention layers share: their sizes, and layers on the compute contract."""
