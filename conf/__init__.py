"""The configuration files, installed as the package tf2dist.conf."""
