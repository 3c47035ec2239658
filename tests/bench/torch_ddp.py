"""The synchronous peer: torch DistributedDataParallel over gloo, one thread in each process."""

import os

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from tests.bench.workload import BATCH_SIZE, HIDDEN_UNITS, LEARNING_RATE, Stopwatch, Workload, run


def network(model: str) -> nn.Module:
    if model == "cnn":
        return nn.Sequential(
            nn.Conv2d(1, 32, 3, padding=1),
            nn.ReLU(),
            nn.Conv2d(32, 64, 3, stride=2, padding=1),
            nn.ReLU(),
            nn.MaxPool2d(2),
            nn.Flatten(),
            nn.Linear(7 * 7 * 64, 64),
            nn.ReLU(),
            nn.Linear(64, 10),
        )
    layers: list[nn.Module] = [nn.Flatten()]
    inputs = 784
    for units in HIDDEN_UNITS[model]:
        layers += [nn.Linear(inputs, units), nn.ReLU()]
        inputs = units
    return nn.Sequential(*layers, nn.Linear(inputs, 10))


def main(workload: Workload) -> None:
    torch.set_num_threads(1)
    workers = workload.jobs["worker"]
    host, _, port = workers[0].partition(":")
    os.environ.update(MASTER_ADDR=host, MASTER_PORT=port, RANK=str(workload.index), WORLD_SIZE=str(len(workers)))
    torch.distributed.init_process_group("gloo")
    images, labels = workload.load_bytes()
    all_images = torch.from_numpy(images).reshape(-1, 1, 28, 28)
    all_labels = torch.from_numpy(labels).long()
    model = DistributedDataParallel(network(workload.model))
    optimizer = torch.optim.SGD(model.parameters(), LEARNING_RATE)
    generator = torch.Generator().manual_seed(workload.index)
    stopwatch, done = Stopwatch(workload), 0
    order = torch.randperm(len(labels), generator=generator).split(BATCH_SIZE)[:-1]
    while not stopwatch.passed(done):
        rows = order[done % len(order)]
        optimizer.zero_grad()
        logits = model(all_images[rows].float() / 255)
        nn.functional.cross_entropy(logits, all_labels[rows]).backward()
        optimizer.step()
        done += 1
    stopwatch.tell()


if __name__ == "__main__":
    run(main)
