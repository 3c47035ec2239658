"""Requests to engines, which run the machines of others: one file for each engine makes the text of its request."""
