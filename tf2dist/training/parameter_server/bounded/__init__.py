"""algorithm=bounded: stale synchronous parallel, in which no worker is far ahead of the slowest.

Q. Ho, J. Cipar, H. Cui, S. Lee, J. K. Kim, P. B. Gibbons, G. A. Gibson, G. Ganger, E. Xing: More Effective Distributed
ML via a Stale Synchronous Parallel Parameter Server, NIPS 2013. A worker that has taken `algorithm.bound` more steps
than the slowest waits on the first ps before it pulls. So what it pulls has every update of the others that is at least
as old: those of all their steps but the last `algorithm.bound` before its own.
"""
