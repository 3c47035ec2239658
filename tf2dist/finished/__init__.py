"""What a run leaves for others: a compiled Keras model, and what is made of it."""
