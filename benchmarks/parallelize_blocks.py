"""The blocks that benchmarks/parallelize.py times: those of models that people have, our own, and others' plans."""

import contextlib
import dataclasses
import os
import tempfile
from collections.abc import Callable
from pathlib import Path

import torch
import torch.distributed as dist
from mpi4py import MPI
from torch import nn

import hpctrain as ht
from hpctrain import models
from hpctrain.layers import Tokens
from hpctrain.models.export import export
from hpctrain.models.gpt2 import GPT2Shape
from hpctrain.models.llama import LlamaShape

BLOCKS, SEQUENCES, LENGTH, VOCABULARY, HEAD = 2, 2, 512, 64, 64


class Stack(nn.Module):
    """Blocks, one after the other; each is given the keywords `given` as well."""

    def __init__(self, blocks, **given):
        super().__init__()
        self.blocks, self.given = nn.ModuleList(blocks), given

    def forward(self, x: torch.Tensor):
        for block in self.blocks:
            x = block(x, **self.given)
        return x


@dataclasses.dataclass
class Model:
    """
    Attributes:
        stack: a function that makes the blocks, the same each time.
        shape: of an input, of 1,024 tokens or pixels.
        native: a function of a grid that makes our own blocks, those of one pipeline stage; or None.
        plan: torch's, {path: style} of a function of its styles; or None.
        auto: a function that makes the blocks by transformers' tp_plan="auto"; or None.
    """

    stack: Callable[[], Stack]
    shape: tuple[int, ...]
    native: Callable | None = None
    plan: dict[str, str] | None = None
    auto: Callable[[], Stack] | None = None


def gpt2(width, folder):
    # gelu_new, in one kernel, as our own layers have it
    how = {"activation_function": "gelu_pytorch_tanh"}
    shape = GPT2Shape(BLOCKS, width, width // HEAD, LENGTH, VOCABULARY)
    native = _written("gpt2", shape, folder)
    return Model(lambda: Stack(_pretrained(folder, **how).transformer.h), (SEQUENCES, LENGTH, width), native)


def llama(width, folder):
    """SwiGLU of 8/3 of the width, rounded up to whole heads; half as many key heads."""
    ffn, heads = -(-8 * width // 3 // HEAD) * HEAD, width // HEAD
    shape = LlamaShape(BLOCKS, width, heads, LENGTH, VOCABULARY, heads // 2, ffn, HEAD)
    native = _written("llama", shape, folder)

    def stack(**how):
        model = _pretrained(folder, **how).model
        positions = model.rotary_emb(torch.empty(1), torch.arange(LENGTH)[None])
        return Stack(model.layers, position_embeddings=positions)

    def auto():
        from transformers.distributed.configuration_utils import DistributedConfig

        ranks, rank = dist.get_world_size(), dist.get_rank()
        os.environ.update(RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=str(ranks))
        return stack(distributed_config=DistributedConfig(tp_size=ranks, tp_plan="auto"))

    columns = "self_attn.q_proj self_attn.k_proj self_attn.v_proj mlp.gate_proj mlp.up_proj".split()
    plan = {**dict.fromkeys(columns, "column"), "self_attn.o_proj": "row", "mlp.down_proj": "row"}
    return Model(stack, (SEQUENCES, LENGTH, width), native, plan, auto)


def torchvision_vit(width, folder):
    from torchvision.models.vision_transformer import EncoderBlock

    def stack():
        torch.manual_seed(0)
        return Stack(EncoderBlock(width // HEAD, width, 4 * width, 0.0, 0.0) for _ in range(BLOCKS))

    return Model(stack, (4, 256, width), plan={"mlp.0": "column", "mlp.3": "row"})  # no style divides its attention


def timm_vit(width, folder):
    from timm.models.vision_transformer import Block

    def stack():
        torch.manual_seed(0)
        return Stack(Block(width, width // HEAD, qkv_bias=True) for _ in range(BLOCKS))

    # queries, keys and values are one after another in its qkv: no rank's columns would be those of whole heads
    plan = {"attn.qkv": "column, whole", "attn.proj": "row, whole", "mlp.fc1": "column", "mlp.fc2": "row"}
    return Model(stack, (4, 256, width), plan=plan)


def resnet50(width, folder):
    """Of the stage of as many channels, 1024 in the third, 512 in the second."""
    from torchvision.models.resnet import Bottleneck

    def stack():
        torch.manual_seed(0)
        return Stack(Bottleneck(width, width // 4) for _ in range(BLOCKS))

    return Model(stack, (4, width, 16, 16))


MODELS = {
    "gpt2": gpt2, "llama": llama, "torchvision ViT": torchvision_vit, "timm ViT": timm_vit, "ResNet-50": resnet50,
}  # fmt: skip


def _written(kind, shape, folder):
    """Writes a model of ours to the folder, in Hugging Face's format; returns a function that makes its blocks."""

    def build(grid):
        return models.get(kind).build(grid, shape, key=ht.RngKey(0), dtype=torch.float32)

    if MPI.COMM_WORLD.rank == 0:
        alone = ht.Grid(comm=MPI.COMM_SELF)
        export(models.get(kind), build(alone), alone, folder)
    MPI.COMM_WORLD.Barrier()

    def native(grid):
        tokens = Tokens.of(grid, SEQUENCES, LENGTH)
        return Stack(build(grid).blocks.values(), tokens=tokens), [row for run in tokens.residual_rows() for row in run]

    return native


def _pretrained(folder, **how):
    import transformers

    transformers.logging.set_verbosity_error()
    transformers.utils.logging.disable_progress_bar()
    transformers.modeling_utils.check_and_set_device_map = lambda device_map: None  # which asks for accelerate
    return transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, **how).train()


def by_torch(stack, plan):
    """torch's parallelize_module over gloo."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import Replicate
    from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

    styles = {
        "column": ColwiseParallel(), "column, whole": ColwiseParallel(output_layouts=Replicate()),
        "row": RowwiseParallel(), "row, whole": RowwiseParallel(input_layouts=Replicate()),
    }  # fmt: skip
    paths = {f"blocks.*.{path}": styles[style] for path, style in plan.items()}
    return parallelize_module(stack, init_device_mesh("cpu", (dist.get_world_size(),)), paths)


@contextlib.contextmanager
def shared_folder():
    """The same on all ranks."""
    with tempfile.TemporaryDirectory() as own:
        yield Path(MPI.COMM_WORLD.bcast(own))
        MPI.COMM_WORLD.Barrier()
