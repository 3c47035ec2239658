"""The module that scripts for Ray import, under the name that rendered scripts have."""
