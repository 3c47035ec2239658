"""Between-graph replication: every worker runs the same program, with its own graph."""

import time
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import tensorflow as tf

from tf2dist.testing import start_ps_cluster

v1 = tf.compat.v1


def program(cluster, index):
    """What every worker runs; only `index` differs."""
    x = np.random.default_rng(index).normal(size=(32, 3)).astype("float32")  # its data
    y = x @ np.float32([[1], [2], [3]])
    jobs, here = cluster.tf_jobs(), f"/job:worker/task:{index}"
    config = v1.ConfigProto(device_filters=["/job:ps", here])  # not other workers
    config.operation_timeout_in_ms = 30_000
    with tf.Graph().as_default():
        setter = v1.train.replica_device_setter(cluster=jobs, worker_device=here)
        with v1.device(setter):  # variables on the ps
            weights = v1.get_variable("weights", initializer=tf.zeros([3, 1]))
            global_step = v1.train.get_or_create_global_step()
            loss = tf.reduce_mean((x @ weights - y) ** 2)
            optimizer = v1.train.GradientDescentOptimizer(0.1, use_locking=True)
            train = optimizer.minimize(loss, global_step)
            initialize = v1.global_variables_initializer()
            missing = v1.report_uninitialized_variables()
        with v1.Session(f"grpc://{jobs['worker'][index]}", config=config) as session:
            if index == 0:
                session.run(initialize)  # the others find the variables by their names
            deadline = time.monotonic() + 30
            while session.run(missing).size and time.monotonic() < deadline:
                time.sleep(0.05)  # between two looks
            options = v1.RunOptions(output_partition_graphs=True)
            metadata = v1.RunMetadata()
            for _ in range(100):
                session.run(train, options=options, run_metadata=metadata)
            parts = metadata.partition_graphs
            devices = {node.device for part in parts for node in part.node} - {""}
            return session.run([global_step, weights]), sorted(devices)


cluster = start_ps_cluster(num_workers=2).cluster
with ThreadPoolExecutor() as threads:  # in place of a process on each host
    results = list(threads.map(program, [cluster, cluster], [0, 1]))
for index, (_, devices) in enumerate(results):
    print(f"the graph of worker {index} ran on", *devices, sep="\n  ")
(global_step, weights), _ = max(results, key=lambda result: result[0][0])  # the last
print(global_step, "updates applied; weights", weights.ravel().round(3))
