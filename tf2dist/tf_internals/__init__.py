"""The private names of TensorFlow and Keras that this project uses, each behind a function with a name of ours.

Another release may rename any of it, and an assignment to an attribute that nobody reads any more has no effect. So
each function checks that what it touches exists and has the expected type; all of them raise `InstallationError`,
which gives the name and the installed version. `missing` tries the central ones.
"""

from tf2dist.tf_internals.keras import (
    MultiOptimizer,
    ScheduleFreeAdamW,
    build_metrics,
    choose_by_path,
    clip_gradient,
    compute_loss,
    config_of,
    count_updates_in,
    counter_of,
    counters_of,
    dataset_of,
    fix_learning_rate,
    follow_learning_rate,
    fresh_names,
    groups_of,
    inner_optimizers,
    inputs_of,
    layers_of,
    learning_rate_of,
    leave_losses_unscaled,
    loss_tracker_of,
    losses_of,
    mask_of,
    may_mix_examples,
    momentums,
    name_of,
    new_variable,
    output_trackers_of,
    own_layers_of_keras,
    place_of,
    profiles,
    scale_learning_rate,
    seed_of,
    seeds_of,
    set_learning_rates,
    slots_of,
    state_of,
    table_of,
    trained_variables,
    undecayed,
    velocities,
    with_inner,
)
from tf2dist.tf_internals.live_tasks import LiveTasks
from tf2dist.tf_internals.probes import missing
from tf2dist.tf_internals.tensorflow import (
    as_one_node,
    body_of,
    exchange,
    keep_threads_from_spinning,
    limit_gpu_memory,
    optimize_graphs_for_cpus,
    outside_strategies,
    publish_functions,
    replace_custom_gradients,
    use_coordination_service,
    wait_at_barrier,
    watches_variables,
)
from tf2dist.tf_internals.variables import AtomicRows, PartitionedVariable, Rows, let_lie_in, rows_in_place_of
