"""A plugin: synchronous workers share no memory; network namespaces stand for hosts, but could."""

from tf2dist.training.synchronous import mesh

mesh.share = lambda *_: None  # type: ignore[attr-defined]
