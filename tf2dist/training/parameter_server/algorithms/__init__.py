"""The algorithms of asynchronous training, each in a file of its own; `config.schema` has their table."""
