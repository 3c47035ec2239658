"""Requests about algorithms and simulated delays that are refused, and what is said of each."""

WAYS_OF_TRAINING: list[tuple[list[str], str]] = [
    # Algorithms.
    (["mode=sync", "algorithm=staleness_aware"], "algorithm (staleness_aware): is for mode=async; leave it out"),
    (["algorithm=stale"], "algorithm (stale): must be one of "),
    (["algorithm.kind=plain"], "algorithm.kind=plain: is set by another option; choose with algorithm=NAME"),
    (["algorithm.strength=2"], "algorithm.strength (2.0): is for algorithm=delay_compensated; add that"),
    (["algorithm=delay_compensated", "algorithm.strength=0"], "algorithm.strength (0.0): must be more than 0"),
    (["algorithm.mean_square_decay=0.9"], "mean_square_decay (0.9): is for algorithm=delay_compensated; add that"),
    (
        ["algorithm=delay_compensated", "algorithm.mean_square_decay=1"],
        "must be at least 0 and less than 1, such as 0.9",
    ),
    (["algorithm=local_sgd"], "algorithm (local_sgd): is for mode=sync; leave it out"),
    (["mode=sync", "algorithm.local_steps=4"], "algorithm.local_steps (4): is for algorithm=local_sgd; add that"),
    (["algorithm.outer_momentum=0.9"], "algorithm.outer_momentum (0.9): is for algorithm=local_sgd; add that"),
    (["mode=sync", "algorithm=local_sgd", "algorithm.local_steps=0"], "algorithm.local_steps (0): must be at least 1"),
    (["mode=sync", "algorithm=local_sgd", "algorithm.outer_momentum=1"], "must be at least 0 and less than 1, such"),
    (["mode=sync", "algorithm=local_sgd", "algorithm.outer_learning_rate=0"], "must be more than 0 and finite"),
    # Simulated delays.
    (["simulate.delay_secs=[0,0,-1]"], "must be a number of seconds for each worker, such as [0,0,0.05], from 0 to"),
    (["simulate.delay_secs=[0,0,nan]"], "must be a number of seconds for each worker"),
    (["simulate.delay_secs=[0,0,1e9]"], "must be a number of seconds for each worker"),
    (["simulate.distribution=normal"], "simulate.distribution (normal): must be constant or exponential"),
    (["simulate.pause=5"], "simulate.pause (5): must name a worker, one of its own steps, and seconds, as in 'worker"),
    (["simulate.pause=worker-2 at 0 for 5"], "simulate.pause (worker-2 at 0 for 5): must name a worker"),
    (["simulate.pause=worker-2 at 300 for 0"], "must name a worker, one of its own steps"),
    (["simulate.pause=ps-0 at 300 for 5"], "must name a worker, one of its own steps"),
]

# Those of which one of the same kind is above, or is shown by another test of what refuses it.
MORE_WAYS_OF_TRAINING: list[tuple[list[str], str]] = [
    (["mode=sync_replicas", "algorithm=delay_compensated"], "(delay_compensated): is for mode=async; leave it out"),
    (["mode=sync_replicas", "algorithm=local_sgd"], "algorithm (local_sgd): is for mode=sync; leave it out"),
    (["mode=sync", "algorithm=local_sgd", "algorithm.local_steps=1.5"], "local_steps (1.5): must be a whole number"),
    (
        ["simulate.delay_secs=[0,0,0.05,1]"],
        "simulate.delay_secs ([0,0,0.05,1]): has 4 numbers for 3 workers; give",
    ),
    (["cluster=local2", "simulate.delay_secs=[1]"], "has 1 numbers for 2 workers"),
    (["simulate.delay_secs=0.05"], "simulate.delay_secs: must be a list"),
    (["simulate.delay_secs=[0,0,soon]"], "simulate.delay_secs[2] (soon): must be a number"),
    (["simulate.distribution=exponential"], "simulate.distribution (exponential): is for simulate.delay_secs; add"),
    (["simulate.pause=worker-3 at 300 for 5"], "there is no worker worker-3 in this cluster; the workers are worker-0"),
    (["mode=sync", "simulate.pause=chief-0 at 300 for 5"], "there is no worker chief-0 in this cluster"),
]
