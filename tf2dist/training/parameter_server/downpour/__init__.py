"""algorithm=downpour: a worker pushes, and fetches, only once in several batches.

J. Dean, G. Corrado, R. Monga, K. Chen, M. Devin, Q. Le, M. Mao, M. Ranzato, A. Senior, P. Tucker, K. Yang, A. Ng: Large
Scale Distributed Deep Networks, NIPS 2012, algorithm 7.1. A worker fetches the weights once in `algorithm.n_fetch`
batches. In between it goes on with weights of its own, which each gradient changes as plain SGD would, with the
learning rate that the ps had at the fetch. Once in `algorithm.n_push` batches it pushes the sum of their gradients.

A push is one update and one step, and it counts everywhere as such: the input gives a worker the examples of `n_push`
batches for each step, and the worker cuts them. In the last step of a pass there are fewer batches, or a shorter one.

The optimizer of the ps gets the sum, as in the paper, not the mean. With SGD an update so moves the weights as far as
its batches would one by one; of a worker that is alone, the run is that of plain SGD. Optimizers that divide by the
size of the gradients, such as Adam, make a step of the same size for a sum as for a mean: for them an update of
several batches is one of a larger batch. Schedules and weight decay are applied once per update.

What belongs to a single gradient is done on the worker for each batch: all clipping, random numbers, and the state of
layers. A recurrence ``new = decay * old + term``, such as a moving average, is pushed as that of all its batches
together, with the power of `decay`.
"""
