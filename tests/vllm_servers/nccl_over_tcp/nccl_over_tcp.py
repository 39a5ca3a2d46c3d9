"""Stands in for NCCL where there is no GPU: vLLM's group and its broadcasts, over the TCP store that they begin with.

A vLLM plug-in, for servers and for whoever sends to them. Everything else of vLLM's weight-transfer engine ``nccl`` is
its own: routes, rendezvous, packing, and the reload of the layers.
"""

import contextlib
from functools import cache

import torch


class TCPGroup:
    """What vLLM needs of a `PyNcclCommunicator`."""

    def __init__(self, group):
        self.group = group

    def broadcast(self, tensor, src, stream=None):
        """Of a uint8 tensor, in place."""
        sent = self.group.broadcast_obj(tensor.numpy() if self.group.rank == src else None, src)
        if self.group.rank != src:
            tensor.copy_(torch.from_numpy(sent))

    def destroy(self):
        """Nothing waits here that could be called off."""


class Stream:
    """Of no device."""

    def synchronize(self):
        """Nothing runs beside us."""


def register():
    """Take NCCL's and CUDA's place in this process."""
    from vllm.distributed.utils import StatelessProcessGroup
    from vllm.distributed.weight_transfer import nccl_common, packed_tensor

    def join(master_address, master_port, rank, world_size, device):
        return TCPGroup(StatelessProcessGroup.create(master_address, master_port, rank, world_size))

    nccl_common.stateless_init_process_group = join
    packed_tensor._get_streams = cache(lambda device, number: tuple(Stream() for _ in range(number)))
    torch.accelerator.current_device_index = lambda: 0
    torch.cuda.stream = lambda stream: contextlib.nullcontext()
