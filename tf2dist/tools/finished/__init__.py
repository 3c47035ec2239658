"""The finished model of a run: a compiled Keras model, and what the commands make of it."""
