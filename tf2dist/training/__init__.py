"""The training loops, and what they report."""
