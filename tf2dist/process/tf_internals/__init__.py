"""What this project uses of TensorFlow and Keras beyond their public names, each behind a function with a name of ours.

Another release may rename any of it, and an assignment to an attribute that nobody reads any more has no effect. So
each function checks that what it touches exists and has the expected type; all of them raise `InstallationError`,
which gives the name and the installed version. `missing` tries them all.
"""

from tf2dist.process.tf_internals.of_keras import (
    build_metrics,
    config_of,
    count_updates_in,
    fix_learning_rate,
    follow_learning_rate,
    fresh_names,
    layers_of,
    learning_rate_of,
    loss_tracker_of,
    losses_of,
    mask_of,
    momentums,
    output_trackers_of,
    own_layers_of_keras,
    place_of,
    scale_learning_rate,
    seeds_of,
    trained_variables,
    undecayed,
    velocities,
)
from tf2dist.process.tf_internals.of_tensorflow import (
    as_one_node,
    exchange,
    keep_threads_from_spinning,
    limit_gpu_memory,
    optimize_graphs_for_cpus,
    publish_functions,
    use_coordination_service,
    wait_at_barrier,
)
from tf2dist.process.tf_internals.probes import missing
from tf2dist.process.tf_internals.stand_ins import PartitionedVariable, let_lie_in

__all__ = [
    "PartitionedVariable",
    "as_one_node",
    "build_metrics",
    "config_of",
    "count_updates_in",
    "exchange",
    "fix_learning_rate",
    "follow_learning_rate",
    "fresh_names",
    "keep_threads_from_spinning",
    "layers_of",
    "learning_rate_of",
    "let_lie_in",
    "limit_gpu_memory",
    "loss_tracker_of",
    "losses_of",
    "mask_of",
    "missing",
    "momentums",
    "optimize_graphs_for_cpus",
    "output_trackers_of",
    "own_layers_of_keras",
    "place_of",
    "publish_functions",
    "scale_learning_rate",
    "seeds_of",
    "trained_variables",
    "undecayed",
    "use_coordination_service",
    "velocities",
    "wait_at_barrier",
]
