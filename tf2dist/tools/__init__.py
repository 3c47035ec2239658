"""Tools beside the training: comparisons, requests to engines, finished models, pictures."""
