"""What a user may ask for: options, their types, defaults and rules. Never imports TensorFlow."""
