"""Four gloo processes for the tests of a file, started once."""

import traceback

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from linvit.environment import forks_of

NUMBER = 4


class Processes:
    """`each(number, function, ...)` calls function(mesh, ...) in the first processes and returns what they return."""

    def __init__(self, folder):
        context = forks_of("timm", "linvit.parallel")
        ends = [context.Pipe() for _ in range(NUMBER)]
        self.connections = [ours for ours, _ in ends]
        self.workers = [
            context.Process(target=serve, args=(rank, theirs, str(folder / "store")), daemon=True)
            for rank, (_, theirs) in enumerate(ends)
        ]
        for worker in self.workers:
            worker.start()
        for _, theirs in ends:
            theirs.close()

    def each(self, number, function, *arguments, timeout=120):
        active = self.connections[:number]
        for connection in active:
            connection.send((number, function, arguments))
        results = []
        for rank, connection in enumerate(active):
            assert connection.poll(timeout), f"process {rank} does not answer"
            results.append(connection.recv())
        for rank, (failure, _) in enumerate(results):
            assert failure is None, f"in process {rank}: {failure}"
        return [result for _, result in results]

    def close(self):
        for worker in self.workers:
            worker.kill()
            worker.join()


def serve(rank, connection, store):
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=NUMBER)
    groups = [dist.new_group(range(number)) for number in range(1, NUMBER + 1)]
    meshes = {n: DeviceMesh.from_group(groups[n - 1], "cpu") for n in range(1, NUMBER + 1) if rank < n}
    while True:
        number, function, arguments = connection.recv()
        try:
            result = None, function(meshes[number], *arguments)
        except Exception:
            result = traceback.format_exc(), None
        connection.send(result)
