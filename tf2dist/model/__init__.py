"""The model as a pure function of its variables."""
