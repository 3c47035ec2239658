"""`tf2dist.predict`: a data set that all workers predict, range by range."""
