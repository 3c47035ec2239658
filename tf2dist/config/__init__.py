"""Options that a user may give, their types, defaults and rules. Never imports TensorFlow."""
