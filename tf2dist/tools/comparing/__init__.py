"""``python -m tf2dist.compare``: the same training in several modes, with and without a slow worker, and its report."""
